"""`ConfiguredPolicy`: what kfuse's own policies have in common."""

from __future__ import annotations

import inspect
from typing import Any

from kfuse.policies.signals import BasePolicy


class ConfiguredPolicy(BasePolicy):
    """A policy whose arguments are settings, which it never changes.

    Its state has none of them: a resumed run takes them from its own configuration, which may have other values than
    the run that wrote the checkpoint. An attribute of another name is state. So state must not have the name of an
    argument: it would not be saved.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the plain attributes, as `BasePolicy` does, but for the arguments of the constructors.

        Attributes that `BasePolicy` declares (`fisher_every`, ...) follow from the arguments, and are left out too.
        """
        classes = [each for each in type(self).__mro__ if issubclass(each, ConfiguredPolicy)]
        settings = {name for each in classes for name in inspect.signature(each).parameters} | vars(BasePolicy).keys()
        return {name: value for name, value in super().state_dict().items() if name not in settings}

"""Quantiles of Student's t, for the 95 % intervals of means."""

from __future__ import annotations

_T975: tuple[float, ...] = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
_T975 += (2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860)
_T975 += (2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423)

MOST_VALUES = len(_T975) + 1
"""The most values whose mean `t_of_mean` has the quantile of."""


def t_of_mean(values: int) -> float:
    """The 97.5 % quantile for the mean of so many independent values: that many less one degrees of freedom.

    Raises ValueError for fewer than 2 or more than `MOST_VALUES` values.
    """
    if not 2 <= values <= MOST_VALUES:
        raise ValueError(f"values={values}: must be 2 to {MOST_VALUES}")
    return _T975[values - 2]

"""What kfuse uses of torch and Triton beyond their public interfaces, and what it says where a name is gone.

Importing `kfuse.kernels`, which all training does first, looks up NAMES: so no step of a training misses one.
"""

import sys

TESTED = "torch 2.13.0 to 2.14.1 and Triton 3.7.1 to 3.9.0"
_OF_OWNERS = {
    "torch": "_foreach_add_ _foreach_copy_ _foreach_div _foreach_mul_ _foreach_norm _foreach_round_ _foreach_sub "
    "_fused_adamw_ _fused_sgd_ "
    "cpu._is_avx512_bf16_supported ops.aten._amp_foreach_non_finite_check_and_unscale_.default",
    "torch.Tensor": "_backward_hooks _make_wrapper_subclass _post_accumulate_grad_hooks _version",
    "torch._C": "DisableTorchFunctionSubclass _current_autograd_node _current_graph_task_id _set_grad_enabled "
    "_distributed_c10d._register_process_group",
    "torch.autograd": "Variable._execution_engine.queue_callback profiler._is_profiler_enabled",
    "torch.distributed": "distributed_c10d._get_default_store ProcessGroup._register_backend "
    "ProcessGroup._set_group_desc ProcessGroup._set_group_name",
    "torch.distributed.ProcessGroupGloo": "_Options._devices _Options._threads _Options._timeout _allgather_base "
    "_end_coalescing _reduce_scatter_base _set_default_timeout _start_coalescing",
    "torch.nn": "Module._apply Module._non_persistent_buffers_set modules.batchnorm._BatchNorm "
    "modules.batchnorm._NormBase modules.module._has_any_global_hook parallel.distributed._find_tensors "
    "parallel.DistributedDataParallel._active_ddp_module",
    "torch.optim": "Optimizer._optimizer_step_post_hooks Optimizer._optimizer_step_pre_hooks "
    "optimizer._global_optimizer_post_hooks optimizer._global_optimizer_pre_hooks",
    "torch.utils": "_pytree.tree_flatten _pytree.tree_leaves _pytree.tree_map "
    "data._utils.worker.WorkerInfo data._utils.worker._worker_info",
}
NAMES = " ".join(f"{owner}.{name}" for owner, names in _OF_OWNERS.items() for name in names.split())


def need(names: str, of: object = None) -> None:
    """Raises RuntimeError, one line, where one of these dotted names is not there. Their package must be imported.

    of: the object that has the last part of each, where it can be seen on an instance alone.
    """
    for name in names.split():
        package, *parts = name.split(".")
        if not (_is_there(package, parts) if of is None else hasattr(of, parts[-1])):
            version = f"{package} {sys.modules[package].__version__}"
            raise RuntimeError(f"{version}: {name}, which kfuse uses, is not there: kfuse was tested with {TESTED}")


def _is_there(path: str, parts: list[str]) -> bool:
    found: object = sys.modules[path]
    for part in parts:
        path = f"{path}.{part}"
        if path in sys.modules:  # torch.optim has deleted its attribute `optimizer`
            found = sys.modules[path]
        elif not hasattr(found, part):
            return part in getattr(found, "__annotations__", ())  # declared in a class, and set on its instances
        else:
            found = getattr(found, part)
    return True

"""Fused verification behind vLLM's rejection sampler: a general plugin of vLLM, off unless it is asked for.

vLLM finds `register` by the entry point of the distribution and calls it in each of its processes.

    TRAINER_FUSED_VERIFY=1         puts `trainer.kernels` behind the rejection sampler of both model runners
    TRAINER_VERIFY_KERNEL=cpu      names the kernel; left out: cpu on a CPU, triton on CUDA and ROCm

This room runs inside vLLM's processes: of the trainer it imports the kernels and `errors`, and nothing of
vLLM before it is asked. What it does not know is left to vLLM, request by request (`features`). A vLLM that
it was not tried with is refused, as it reaches into what no vLLM promises to keep.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import wraps
from importlib import import_module
from typing import Any

from trainer.errors import UserError
from trainer.kernels import select
from trainer.vllm_plugin.fused import Fused, Verify

SWITCH, KERNEL = "TRAINER_FUSED_VERIFY", "TRAINER_VERIFY_KERNEL"
TRIED = ("0.32.0",)
KERNELS = {"cpu": "cpu", "cuda": "triton"}  # by the device's type, which is cuda on ROCm, too
RUNNERS = {"vllm.v1.worker.gpu_model_runner": "trainer.vllm_plugin.runner_v1",
           "vllm.v1.worker.gpu.model_runner": "trainer.vllm_plugin.runner_v2"}


def register() -> None:
    """Raises UserError where it was asked for and cannot be had: vLLM does not start without it then."""
    if not asked_for(os.environ):
        return
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    require_tried(vllm.__version__)
    load_kernel(os.environ.get(KERNEL), current_platform.device_type)
    wrap_workers(WorkerWrapperBase)


def asked_for(environment: Mapping[str, str]) -> bool:
    value = environment.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise UserError(f"{SWITCH}={value} is not known; set 1 for fused verification, or leave it out")
    return value == "1"


def require_tried(version: str) -> None:
    """Raises UserError for a vLLM that this was not tried with."""
    if version.partition("+")[0] not in TRIED:
        raise UserError(f"{SWITCH}=1 was tried with vLLM {', '.join(TRIED)} alone, and this is vLLM "
                        f"{version}: leave {SWITCH} out, which gives vLLM's own verification, or install "
                        "that version")


def load_kernel(name: str | None, device: str) -> tuple[str, Verify]:
    """The kernel for a device's type and its name; raises UserError if it cannot be used there."""
    name = name or KERNELS.get(device)
    if name is None:
        raise UserError(f"{SWITCH}=1 has no kernel for the device {device}, only for "
                        f"{' and '.join(KERNELS)}: leave {SWITCH} out")
    if name == "cpu" and device != "cpu":
        raise UserError(f"{KERNEL}=cpu takes logits of a CPU, and this vLLM computes on {device}: name "
                        "another kernel, or leave it out")
    try:
        return name, select.verify(name)
    except ImportError as error:
        raise UserError(f"{KERNEL}={name} needs {error.name or error}, which this environment lacks: install "
                        "it there, or name another kernel") from error
    except UserError as error:
        raise UserError(f"{KERNEL}: {error}") from error


def wrap_workers(wrapper: type[Any]) -> None:
    """Makes workers put the kernel behind their model runner once it has loaded its model: it has its
    samplers by then. `wrapper` is what every executor of vLLM has around its workers."""
    start = wrapper.init_device
    if hasattr(start, "fused_verification"):  # vLLM may register plugins twice
        return

    @wraps(start)
    def init_device(self: Any) -> None:
        start(self)
        worker = self.worker
        load = worker.load_model

        @wraps(load)
        def load_model(*given: Any, **named: Any) -> Any:
            done = load(*given, **named)
            install(worker.model_runner)
            return done

        worker.load_model = load_model

    init_device.fused_verification = True
    wrapper.init_device = init_device


def install(runner: Any) -> None:
    """Puts the kernel that was asked for behind a model runner that has a rejection sampler."""
    from vllm.logger import init_logger

    log = init_logger(f"vllm.{__name__}")
    sampler = getattr(runner, "rejection_sampler", None)
    if sampler is None:
        log.info("fused verification: nothing is drafted here, so nothing is verified")
    if sampler is None or sampler is getattr(runner, "fused_verification", None):  # loaded once more
        return
    runner.fused_verification = sampler
    module = next((RUNNERS[kind.__module__] for kind in type(runner).__mro__
                   if kind.__module__ in RUNNERS), None)
    if module is None:
        raise UserError(f"{SWITCH}=1 knows vLLM's model runners V1 and V2, and not {type(runner).__name__}: "
                        f"leave {SWITCH} out")
    name, verify = load_kernel(os.environ.get(KERNEL), runner.device.type)
    problem = import_module(module).install(runner, Fused(verify, log))
    if problem is None:
        log.info("fused verification: kernel %s behind %s's rejection sampler", name, type(runner).__module__)
    else:
        log.warning("fused verification does not know %s: vLLM verifies everything itself", problem)

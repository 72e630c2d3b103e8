"""Ways to run a step, or a layer, other than as it is served: the plain twins and stand-ins."""

from __future__ import annotations

from torch import nn

from protos.plan import StepPlan, StepResult
from worker.cpu_layers.decoder_layer import FusedLayer
from worker.runner import Runner


def run_step(runner: Runner, plan: StepPlan) -> StepResult:
    """Launches `plan` and waits for its result."""
    return runner.launch(plan).wait()


def pad_steps(runner: Runner) -> None:
    """From now on all steps have the shapes that graphs need, which a CPU does not capture."""
    if runner.ready().device == "cpu" and runner._static is None:
        runner.use_static_inputs(captures=False)


def unfuse_model(model: nn.Module) -> None:
    """Bring every layer's own forward back."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), FusedLayer):
            del module.forward

"""AdamW without `torch.optim.Optimizer`, which imports torch's compiler (2 CPU-seconds)."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw


class AdamW:
    """AdamW on some parameters, which are all on one device.

    On a CPU its steps have the bytes of `torch.optim.AdamW(fused=True)`: one pass over the weights
    in place of nine, and square roots that are rounded correctly, which those of `torch.sqrt` are
    not on every CPU. The number of threads changes no byte.

    Memory: two values per parameter.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019; the arithmetic is
    torch's function `adamw`.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float
    ) -> None:
        self.parameters = list(parameters)
        self.lr = lr
        self.weight_decay = weight_decay
        # state by number of the parameter, from its first gradient on: step, exp_avg, exp_avg_sq
        self.states: dict[int, dict[str, Tensor]] = {}

    def zero_grad(self) -> None:
        """Removes the gradients of all parameters."""
        for parameter in self.parameters:
            parameter.grad = None

    def load_states(self, states: dict[int, dict[str, Tensor]]) -> None:
        """Sets stored states; the number of steps stays on the CPU."""
        for i, stored in states.items():
            device = self.parameters[i].device
            self.states[i] = {
                name: value if name == "step" else value.to(device)
                for name, value in stored.items()
            }

    @torch.no_grad()
    def step(self) -> None:
        """Makes one step for each parameter that has a gradient."""
        parameters: list[Tensor] = []
        gradients = []
        states = []
        for i, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                continue
            if i not in self.states:
                self.states[i] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
            parameters.append(parameter)
            gradients.append(parameter.grad)
            states.append(self.states[i])
        adamw(
            parameters,
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.lr,
            weight_decay=self.weight_decay,
            eps=1e-8,
            maximize=False,
            fused=self.parameters[0].is_cpu,
        )

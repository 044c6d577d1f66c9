"""Training of one head on one fold: losses, steps, epochs.

A killed training resumes and gives the same bytes.

All random choices (order, tiles, dropout) depend only on the seed, the epoch and the cases, so that
no random state must be stored. A checkpoint has weights, optimiser and history.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.adamw import adamw

from thinsection.attention.products import fast_products
from thinsection.config import as_mapping
from thinsection.errors import InvalidInputError
from thinsection.evaluation.labels import Cohort, items_if_several
from thinsection.evaluation.parts import FoldCases
from thinsection.evaluation.target import FAR, Target
from thinsection.files.atomic import parse_json
from thinsection.predict.bags import Bag, Bags
from thinsection.predict.config import FitConfig
from thinsection.predict.heads.config import HeadConfig
from thinsection.predict.heads.head import (
    Criterion,
    HeadOutput,
    fit_covariates,
    head_for,
    load_head,
)
from thinsection.predict.outputs import outputs_of
from thinsection.types import Floats
from thinsection.weights.files import write_tensors
from thinsection.weights.placement import resolve_device

State = dict[str, Tensor]
# losses of the training cases and of the inner cases, by epoch
Losses = list[tuple[float, float]]
HEADER_KEY = "told"  # metadata are one value, since several have no fixed order
INNER = 1 << 30  # replaces the epoch in seeds for draws from inner cases
COX_CASES = 16  # number of cases whose risks are compared in a step
# The validation loss has fallen if it is lower by this share of the loss of a constant prediction.
FALL = 0.01
# A head knows its training cases by heart if their loss is below this share of that of a constant
# prediction: their gradients are nearly gone. It has learnt too much if their loss is below the
# second share, and the validation loss above that of a constant prediction.
BY_HEART = 0.02
TOO_MUCH = 0.5
SHORT_PATIENCE = (
    3  # patience in epochs of a head that knows its training cases by heart
)


def with_recipe(fit: FitConfig, head: str) -> FitConfig:
    """Settings with the head's own recipe in place of 0."""
    recipe = load_head(head).recipe
    return replace(
        fit,
        lr=fit.lr or recipe.lr,
        epochs=fit.epochs or recipe.epochs,
        patience=fit.patience or recipe.patience,
        starts=fit.starts or recipe.starts,
    )


class ConstantLosses(NamedTuple):
    """Losses of a constant prediction: of the training cases in their batches, and the inner."""

    train: float
    inner: float


class Trainer:
    """Training of one fold.

    Memory: the head five times (weights, gradient, AdamW's two, the best so far), the bags of a
    step, and the memory of one bag in the head.
    """

    def __init__(
        self, bags: Bags, cohort: Cohort, part: FoldCases, *, fold: int, fit: FitConfig
    ) -> None:
        for name in ("lr", "epochs", "patience", "starts"):
            if not getattr(fit, name) > 0:
                raise InvalidInputError(
                    f"{name} must be > 0, got {getattr(fit, name)}; see with_recipe"
                )
        self.bags = bags
        self.cohort = cohort
        self.part = part
        self.fold = fold
        self.fit = fit
        train_rows = list(part.train)
        self.target = cohort.target.fitted(cohort.array[train_rows])
        self.device = resolve_device(fit.device, mps=False)
        on_cuda = self.device.type == "cuda"
        self.bf16 = fit.precision == "bf16" or (fit.precision == "auto" and on_cuda)
        y = targets_of(self.target, cohort.array)
        self.y = y.to(self.device)
        self.cox = self.target.kind == "cox"
        self.criterion = criterion_of(
            self.target, y[train_rows], weighted=fit.class_weights
        )
        self._batch_cases = fit.batch_cases or (COX_CASES if self.cox else 1)

    @fast_products()
    def run(self, config: HeadConfig, checkpoint: Path, key: str) -> None:
        """Trains until patience ends, from the checkpoint of this key if there is one.

        An attention that starts in a bad place may learn its training cases by heart and stay at
        chance on others. Where the inner loss shows it, training starts again from other weights.

        Afterwards `head` has the weights of the best epoch of all starts, `losses` the losses of
        all epochs, and `starts` the number of epochs before each start.
        """
        first = self.bags.read(self.part.train[0], most=1, rng=np.random.default_rng(0))
        dim = first.features.shape[1]
        cards = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cards):
            self.losses: Losses = []
            self.starts = [0]
            self._draw_head(config, dim)
            best = self._restore(checkpoint, key)
            saved = time.monotonic()
            while not self._is_over():
                if self._start_is_over():
                    self.starts.append(len(self.losses))
                    self._draw_head(config, dim)
                losses = (self._epoch(len(self.losses) + 1), self._inner_loss())
                self.losses.append(losses)
                if not np.isfinite(losses).all():
                    raise InvalidInputError(
                        f"loss must stay finite, got {losses} in epoch {len(self.losses)} of "
                        f"fold {self.fold}; lower lr=..."
                    )
                if _best_epoch(self.losses) == len(self.losses):
                    best = {
                        name: value.detach().clone()
                        for name, value in self.head.state_dict().items()
                    }
                if time.monotonic() - saved >= self.fit.checkpoint_s:
                    self._save(best, checkpoint, key)
                    saved = time.monotonic()
        self.head.load_state_dict(best)
        self.head.eval()

    def _draw_head(self, config: HeadConfig, dim: int) -> None:
        """Sets a head with the initial weights of the current start, and its optimiser."""
        self._seed(INNER, len(self.starts) - 1)
        covariates = self.bags.covariates
        num_covariates = 0 if covariates is None else covariates.shape[1]
        head = head_for(config, dim, self.target, num_covariates)
        if covariates is not None:
            # of the training cases alone: test cases must not decide the scale
            values = covariates[list(self.part.train)].astype(np.float32)
            fit_covariates(head, torch.from_numpy(values))
        self.head = head.to(self.device)
        self.optimizer = AdamW(
            self.head.parameters(),
            lr=self.fit.lr,
            weight_decay=self.fit.weight_decay,
        )

    def _start_is_over(self) -> bool:
        """True if no epoch follows from the current initial weights.

        A head that knows its training cases by heart learns nothing more from them, so the
        patience is short then.
        """
        losses = self.losses[self.starts[-1] :]
        if len(losses) >= self.fit.epochs:
            return True
        if not losses:
            return False
        constant = self._constant
        train, inner = losses[-1]
        patience = self.fit.patience
        by_heart = train < BY_HEART * constant.train
        too_much = train < TOO_MUCH * constant.train and inner > constant.inner
        if by_heart or too_much:
            patience = min(patience, SHORT_PATIENCE)
        since_fall = len(losses) - _last_fall(losses, FALL * constant.inner)
        return since_fall >= patience

    def _is_over(self) -> bool:
        """True if no epoch follows: the head has learnt, or no start is left.

        It has learnt if its least inner loss is below that of a constant prediction by more than
        a share of 1 / sqrt(n), n inner cases: the mean loss of few cases is low by chance.
        """
        if not self._start_is_over():
            return False
        if len(self.starts) == self.fit.starts:
            return True
        least = min(inner for _, inner in self.losses)
        gain = 1 / math.sqrt(len(self.part.stop))
        return least < (1 - gain) * self._constant.inner

    @cached_property
    def _constant(self) -> "ConstantLosses":
        """Losses of the same logits for every case, those of least loss in training."""
        # scipy's search: that of torch.optim imports torch's compiler
        from scipy.optimize import minimize

        def mean_loss(logits: Floats, rows: Sequence[int]) -> tuple[float, Floats]:
            z = torch.tensor(logits, requires_grad=True)
            loss = self._mean_loss(z.to(self.device).expand(len(rows), -1), rows)
            (slope,) = torch.autograd.grad(loss, z)
            return float(loss.detach()), slope.numpy()

        start = np.zeros(len(self.target.names))
        best = minimize(mean_loss, start, (self.part.train,), "L-BFGS-B", jac=True)
        rows = self.part.train
        size = self._batch_cases if self.cox else len(rows)
        batches = [rows[i : i + size] for i in range(0, len(rows), size)]
        train = sum(len(part) * mean_loss(best.x, part)[0] for part in batches)
        return ConstantLosses(
            train=train / len(rows), inner=mean_loss(best.x, self.part.stop)[0]
        )

    def _seed(self, epoch: int, case: int) -> None:
        """Seeds torch: for initial weights, or for the dropout of an epoch from this case on."""
        sequence = np.random.SeedSequence([self.fit.seed, self.fold, epoch, case])
        seed = int(sequence.generate_state(1)[0])
        # torch.manual_seed seeds every kind of device, and is slow where most are absent
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _forward(self, bag: Bag) -> HeadOutput:
        """Output of the head for a bag."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            output: HeadOutput = self.head(*bag.tensors(self.device))
        return output

    def _epoch(self, epoch: int) -> float:
        """Trains one epoch, a step per `batch_cases` cases; returns the mean loss."""
        seed = [self.fit.seed, self.fold, epoch]
        order = np.random.default_rng(seed).permutation(self.part.train).tolist()
        stream = self.bags.stream(order, most=self.fit.bag_size, seed=seed)
        total = 0.0
        self.head.train()
        self._seed(epoch, 0)
        while batch := list(islice(stream, self._batch_cases)):
            total += self._step(batch, epoch)
        return total / len(order)

    def _step(self, batch: Sequence[tuple[int, Bag]], epoch: int) -> float:
        """Makes one step of the optimiser; returns the sum of the cases' losses."""
        self.optimizer.zero_grad()
        criteria = [self.criterion] * len(batch)
        total = 0.0
        if self.cox:
            self._seed(epoch, batch[0][0])
            criteria, mean_loss = self._slopes(batch)
            total = mean_loss * len(batch)
            self._seed(epoch, batch[0][0])  # the dropout is the same again
        for (case, bag), criterion in zip(batch, criteria, strict=True):
            output = self._forward(bag)
            loss = self.head.loss(output, self.y[case], criterion)
            if not self.cox:
                total += float(loss.detach())
                loss = loss / len(batch)
            loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return total

    def _slopes(
        self, batch: Sequence[tuple[int, Bag]]
    ) -> tuple[list[Criterion], float]:
        """For each case z times d loss / d risk, and the mean loss.

        Only one bag at a time keeps its gradients.
        """
        with torch.no_grad():
            risks = [self._forward(bag).logits[0].float() for _, bag in batch]
        risk = torch.stack(risks).requires_grad_()
        loss = self._mean_loss(risk[:, None], [case for case, _ in batch])
        (slopes,) = torch.autograd.grad(loss, risk)
        return [partial(_times, slope) for slope in slopes], float(loss.detach())

    def _inner_loss(self) -> float:
        """Mean loss of the inner cases; their tiles are drawn in the same way after every epoch."""
        rows = list(self.part.stop)
        seed = [self.fit.seed, self.fold, INNER]
        bags = self.bags.stream(rows, most=self.fit.bag_size, seed=seed)
        self.head.eval()
        with torch.no_grad():
            logits = torch.stack([self._forward(bag).logits for _, bag in bags])
            return float(self._mean_loss(logits, rows))

    def _mean_loss(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Mean loss of some cases from their logits (n, K)."""
        y = self.y[list(rows)]
        if self.cox:
            return cox_loss(logits[:, 0], y)
        losses = [self.criterion(z, t) for z, t in zip(logits, y, strict=True)]
        return torch.stack(losses).mean()

    @fast_products()
    def predict(self, bags: Bags, cases: Sequence[int]) -> Tensor:
        """Logits (n, K) in float64 for complete bags, computed in fp32.

        Memory: see `outputs_of`.
        """
        logits = []
        self.head.eval()
        with torch.inference_mode():
            for case in cases:
                covariates = bags.covariates_of(case)
                if covariates is not None:
                    covariates = covariates.to(self.device)
                ((_, output),) = outputs_of(
                    {0: self.head},
                    bags.stored(case),
                    self.device,
                    covariates=covariates,
                )
                logits.append(output.logits.double().cpu())
        return torch.stack(logits or [torch.zeros(0)])

    def write(self, path: Path, key: str) -> None:
        """Writes the head, and its fp32 logits for inner and test cases and their slides."""
        tensors = {
            f"head.{name}": value.cpu().contiguous()
            for name, value in self.head.state_dict().items()
        }
        tensors["stop"] = self.predict(self.bags, self.part.stop)
        tensors["logits"] = self.predict(self.bags, self.part.test)
        slides = []
        cases = []
        for case in self.part.test:
            files = items_if_several(self.cohort.files[case])
            slides += [[Path(file)] for file in files]
            cases += [case] * len(files)
        covariates = self.bags.covariates
        if covariates is not None:
            covariates = covariates[cases]  # a slide has those of its case
        with Bags(slides, cells=self.bags.cells, covariates=covariates) as bags:
            tensors["slides"] = self.predict(bags, range(len(bags)))
        header = {
            "key": key,
            "losses": self.losses,
            "first_epochs": self.starts,
            "best": _best_epoch(self.losses),
            "target": as_mapping(self.target),
        }
        write_tensors(path, tensors, {HEADER_KEY: json.dumps(header)})

    def _save(self, best: State, path: Path, key: str) -> None:
        """Writes a checkpoint: tensors `head.*`, `best.*`, and `adam<i>.*` of each parameter."""
        states = {"head": self.head.state_dict(), "best": best}
        for i, own in self.optimizer.states.items():
            states[f"adam{i}"] = own
        flat = {}
        for part, state in states.items():
            for name, value in state.items():
                flat[f"{part}.{name}"] = value.contiguous()
        header = {"key": key, "losses": self.losses, "starts": self.starts}
        write_tensors(path, flat, {HEADER_KEY: json.dumps(header)})

    def _restore(self, path: Path, key: str) -> State:
        """Best weights so far; sets head, optimiser and history to their stored state."""
        if not path.exists():
            return {}
        header, flat = read_state(path)
        if header.get("key") != key:
            return {}
        states = defaultdict[str, State](dict)
        for name, value in flat.items():
            part, _, parameter = name.partition(".")
            states[part][parameter] = value
        self.head.load_state_dict(states.pop("head"))
        best = states.pop("best")
        self.optimizer.load_states(
            {int(part.removeprefix("adam")): own for part, own in states.items()}
        )
        self.losses = [(train, inner) for train, inner in header["losses"]]
        self.starts = header["starts"]
        return best


def _times(slope: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    return (logits * slope).sum()


def read_state(path: Path) -> tuple[dict[str, Any], State]:
    """Header of a fold's file or a checkpoint, and its tensors."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
        return parse_json(file.metadata()[HEADER_KEY]), tensors


def _last_fall(losses: Losses, least: float) -> int:
    """Last epoch, from 1, whose inner loss was lower by `least` than after the fall before it."""
    epoch = 0
    level = math.inf
    for i, (_, inner) in enumerate(losses, 1):
        if inner < level - least:
            epoch = i
            level = inner
    return epoch


def _best_epoch(losses: Losses) -> int:
    """Epoch with the lowest inner loss, from 1, the first of equal ones; 0 before any epoch."""
    if not losses:
        return 0
    inner = [loss for _, loss in losses]
    return 1 + inner.index(min(inner))


def targets_of(target: Target, values: Floats) -> Tensor:
    """One row per case for the criterion: class; labels; scaled value; event and time.

    A blank label is NaN.

    Logits of ordered classes are their log probabilities (`OrdinalHead`): the loss of classes is
    their negative log likelihood too.
    """
    if target.exclusive:
        return torch.from_numpy(values[:, 0].astype(np.int64))
    if target.kind == "regression":
        values = (values - target.center) / target.spread
    if target.kind == "discrete":
        bins = np.searchsorted(target.edges, values[:, 1], side="left")
        values = np.stack([values[:, 0], bins], axis=1)
    return torch.from_numpy(values.astype(np.float32))


def criterion_of(target: Target, train: Tensor, *, weighted: bool) -> Criterion:
    """Loss of one case from logits (K,) and its target; 'cox' has none, see `cox_loss`.

    Args:
        target: predicted target.
        train: targets of the training cases.
        weighted: True gives rare classes a larger weight.
    """
    if target.exclusive:
        weights = torch.ones(len(target.names))
        if weighted:
            counts = torch.bincount(train, minlength=len(weights))
            weights = len(train) / (len(weights) * counts)
        return lambda z, y: F.cross_entropy(z.float(), y) * weights.to(z.device)[y]
    if target.kind == "multilabel":
        return _label_loss(train, weighted=weighted)
    if target.kind == "regression":
        # squared error, but linear beyond FAR: one far value does not rule the gradient
        return lambda z, y: 2 * F.huber_loss(z.float(), y, delta=FAR)
    return discrete_loss


def _label_loss(train: Tensor, *, weighted: bool) -> Criterion:
    """Loss of the labels of a case that are not blank, over the number of all labels.

    So each known label of each case weighs the same: the sum over cases is that of the losses of
    the labels, each over the cases that have it.
    """
    positives = (train == 1).sum(0).float()
    weights = torch.ones_like(positives)
    if weighted:
        weights = (train == 0).sum(0) / positives

    def loss(z: Tensor, y: Tensor) -> Tensor:
        is_known = ~y.isnan()
        losses = F.binary_cross_entropy_with_logits(
            z.float(),
            y.nan_to_num(),
            pos_weight=weights.to(z.device),
            reduction="none",
        )
        return torch.where(is_known, losses, 0).mean()

    return loss


def discrete_loss(logits: Tensor, y: Tensor) -> Tensor:
    """-log likelihood of an event in an interval, or of no event up to it; y = (event, interval).

    Source: Zadeh and Schmid, Bias in cross-entropy-based training of deep survival networks, 2020.
    """
    event = y[0]
    place = int(y[1])
    survived = F.logsigmoid(-logits.float()).cumsum(0)
    before = survived[place - 1] if place else survived.new_zeros(())
    seen = before + F.logsigmoid(logits[place].float())
    return torch.where(event == 1, -seen, -survived[place])


def cox_loss(risk: Tensor, y: Tensor) -> Tensor:
    """-log partial likelihood (Breslow) per event, risks (n,) and y (n, 2): event, time."""
    event = y[:, 0] == 1
    time = y[:, 1]
    at_risk = torch.where(time[None] >= time[:, None], risk[None].float(), -torch.inf)
    terms = (at_risk.logsumexp(1) - risk.float())[event]
    return terms.sum() / max(1, int(event.sum()))


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

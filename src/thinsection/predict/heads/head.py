"""The contract of a head: the rows of a bag in; logits, attention and evidence out.

Shapes: N rows of a bag (the tiles of a slide, or of all slides of a case; one row a slide where
they are slide embeddings), D channels of an embedding, H hidden ones, A attentions (1, or one an
output), K outputs: classes, values, a risk, intervals of time.

**Evidence.** `evidence[n, k]` is what tile n adds to logit k. In a sum over tiles it is attention
times class evidence, a_n w_k . h_n, and evidence.sum(0) + bias = logits exactly (Javed et al.,
"Additive MIL", 2022, eq. 5, on a linear classifier). CLAM and MIL-Lab show the attention alone:
that is `attention`. A head that does more says so in its docstring.

**Covariates.** Numbers of a case that are not of its tiles, such as age. They add a linear term to
the logits (to the score of ordered classes): evidence.sum(0) + bias + weight . z = logits, with
z = (value - mean) / standard deviation of the training cases, and 0 for a missing value.

**Ordered classes.** Proportional odds on one score, which any head computes: P(class > k) =
sigmoid(score - threshold k). The thresholds rise by construction (McCullagh, "Regression models for
ordinal data", JRSS B 42, 1980).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from thinsection.errors import ConfigError, InvalidInputError, naming_part
from thinsection.evaluation.target import Target
from thinsection.predict.heads.config import BLOCK_ROWS, HEADS, HeadConfig

Criterion = Callable[[Tensor, Tensor], Tensor]  # logits (K,), target -> loss
Survey = tuple[
    Tensor, ...
]  # what a head knows of a whole bag before it reads its tiles
# their instance loss needs an output for each class
_BY_CLASS = ("clam_sb", "clam_mb")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Training of a head unless the user says otherwise.

    Attention heads stay near chance for some dozens of epochs before they find the tiles that
    matter. From some initial weights they never do: they learn the training cases by heart. So
    weights are drawn anew, up to `starts` times, while the inner loss shows that nothing was
    learnt. `benchmarks/recipes.py` compares each recipe with the authors' training.
    """

    lr: float = 5e-4
    epochs: int = 100
    patience: int = 40
    starts: int = 3


class HeadOutput(NamedTuple):
    """The answer of a head for one bag."""

    logits: Tensor  # (K,)
    attention: Tensor | None = None  # (N, A), a softmax over tiles
    evidence: Tensor | None = None  # (N, K), see above; (N, 1) of ordered classes
    instances: Tensor | None = None  # (N, H or K), what `extra_loss` reads


class Covariates(nn.Module):
    """What the covariates (C,) of a case add to K logits: weight . z; 0 before training.

    The mean and the standard deviation are those of the training cases, and saved with the weights.
    """

    center: Tensor
    spread: Tensor

    def __init__(self, num_covariates: int, outputs: int) -> None:
        super().__init__()
        # zeros draw nothing from torch's generator: the other weights are those without covariates
        self.weight = nn.Parameter(torch.zeros(outputs, num_covariates))
        self.register_buffer("center", torch.zeros(num_covariates))
        self.register_buffer("spread", torch.ones(num_covariates))

    def fit(self, values: Tensor) -> None:
        """Sets mean and standard deviation from the training cases (n, C), NaN for no value.

        The standard deviation of a column with one value is 1.

        Raises InvalidInputError: a column has no value; see
        `check_values_of_folds`.
        """
        known = ~values.isnan()
        count = known.sum(0)
        if not bool(count.all()):
            raise InvalidInputError(
                "each covariate must have a value in the training cases, got none in column "
                f"{int(count.argmin())}"
            )
        filled = values.nan_to_num()
        center = filled.sum(0) / count
        squares = torch.where(known, (filled - center) ** 2, 0).sum(0) / count
        low = torch.where(known, values, torch.inf).amin(0)
        high = torch.where(known, values, -torch.inf).amax(0)
        # the mean of equal values is rounded, so their spread may be tiny, and not 0
        spread = torch.where(high > low, squares.sqrt(), 1.0)
        self.center.copy_(center)
        self.spread.copy_(spread)

    def forward(self, values: Tensor) -> Tensor:
        """What the values (C,) add to the logits (K,)."""
        scaled = (values - self.center) / self.spread
        return self.weight @ torch.where(values.isnan(), 0, scaled)


class Head(nn.Module, ABC):
    """One bag in, its logits out; a bag is a batch of its own."""

    recipe: ClassVar[Recipe] = Recipe()
    bag_weight = 1.0  # weight of the bag's loss; `extra_loss` has the rest
    needs_cells = False  # whether `forward` reads where tiles lie
    # whether a bag can be read in blocks: `of_block` and `of_values` give what `forward` gives
    reads_blocks = False
    # whether `of_block` needs the `survey` of all blocks first, so that a bag is read twice
    surveys = False
    # whether `forward` gives for the mean of a bag, one row, what it gives for the bag
    reads_mean = False

    def __init_subclass__(cls) -> None:
        """A subclass with another `forward` or `pool` reads whole bags unless it says otherwise."""
        super().__init_subclass__()
        parent = next(base for base in cls.__mro__[1:] if issubclass(base, Head))
        # a method may also come from a class that is no head, as with `class Own(Mixin, AbmilHead)`
        methods = [(c.forward, getattr(c, "pool", None)) for c in (cls, parent)]
        if methods[0] != methods[1]:
            for name in ("reads_blocks", "surveys", "reads_mean"):
                if name not in vars(cls):
                    setattr(cls, name, False)

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__()
        self.dim = dim
        self.outputs = outputs
        self.settings = settings
        self.covariates: Covariates | None = None  # see `head_for`

    def __call__(
        self,
        embeddings: Tensor,
        coords: Tensor | None = None,
        covariates: Tensor | None = None,
    ) -> HeadOutput:
        """Answer of `forward`, checked: heads come from other packages too; with covariates."""
        with naming_part("head", self.settings.head, self):
            output: object = super().__call__(embeddings, coords)
            checked = self._checked(output)
        return self.beside(checked, covariates)

    def beside(self, output: HeadOutput, covariates: Tensor | None) -> HeadOutput:
        """The output with what the covariates (C,) of the case add to its logits.

        Raises InvalidInputError: the head needs covariates, and there are none.
        """
        if self.covariates is None:
            return output
        if covariates is None:
            raise InvalidInputError(
                f"covariates must be {len(self.covariates.center)} numbers for a head that was "
                "trained with them, got none; pass those of the case"
            )
        added = self.covariates(covariates)
        return output._replace(logits=output.logits + added)

    def _checked(self, output: object) -> HeadOutput:
        """The output if it is one for K outputs.

        Raises InvalidInputError: names the class, the value and the remedy.
        """
        place = type(self).__name__
        if not isinstance(output, HeadOutput):
            raise InvalidInputError(
                f"{place}.forward must return a HeadOutput, got {type(output).__name__}; "
                "return HeadOutput(logits)"
            )
        shape = tuple(output.logits.shape)
        if shape != (self.outputs,):
            raise InvalidInputError(
                f"logits of {place}.forward must have shape ({self.outputs},), one number per "
                f"output, got {shape}; a bag is one case, without a batch axis"
            )
        return output

    @abstractmethod
    def forward(self, embeddings: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """Logits, attention and evidence of one bag.

        Args:
            embeddings: (N, D) float32, N >= 1.
            coords: int64 (N, 2), column and row of each tile in units of tiles (`grid_cells`); only
                'transformer' reads them.

        Memory: 4 N (D + H + 3 attention_dim) bytes in inference unless the head says otherwise.
        """

    def survey(self, block: Tensor, so_far: Survey) -> Survey:
        """What `of_block` must know of the whole bag, from the blocks so far and one more.

        Args:
            block: the next BLOCK_ROWS tiles, or fewer in the last block.
            so_far: the answer for the blocks before; () before the first.
        """
        raise NotImplementedError(f"{type(self).__name__} needs no survey")

    def of_block(self, block: Tensor, survey: Survey = ()) -> tuple[Tensor, ...]:
        """Values (n, ...) of BLOCK_ROWS tiles, or fewer in the last block, for `of_values`."""
        raise NotImplementedError(f"{type(self).__name__} is not read in blocks")

    def of_values(self, *values: Tensor) -> HeadOutput:
        """Logits, attention and evidence of a bag from the values (N, ...) of its tiles."""
        raise NotImplementedError(f"{type(self).__name__} is not read in blocks")

    def parts_of(self, embeddings: Tensor) -> tuple[Tensor, ...]:
        """The blocks in which a bag in memory is read; in training the bag itself."""
        if self.training:
            return (embeddings,)
        return torch.split(embeddings, BLOCK_ROWS)

    def of_case(
        self, values: Sequence[Tensor], covariates: Tensor | None
    ) -> HeadOutput:
        """`of_values`, with the covariates (C,) of the case."""
        return self.beside(self.of_values(*values), covariates)

    def extra_loss(
        self, output: HeadOutput, target: Tensor, criterion: Criterion
    ) -> Tensor:
        """The loss that the method's authors add to the bag's; weighs 1 - `bag_weight`."""
        return output.logits.new_zeros(())

    def loss(self, output: HeadOutput, target: Tensor, criterion: Criterion) -> Tensor:
        """bag_weight * criterion(logits, target) + (1 - bag_weight) * extra_loss."""
        bag = criterion(output.logits, target)
        if self.bag_weight == 1:
            return bag
        extra = self.extra_loss(output, target, criterion)
        return self.bag_weight * bag + (1 - self.bag_weight) * extra


def load_head(name: str) -> type[Head]:
    """The class of a head.

    Raises ConfigError: no such head. InvalidInputError: another package's head is none.
    """
    head: object = HEADS.load(name)
    if not (isinstance(head, type) and issubclass(head, Head)):
        raise InvalidInputError(
            f"head {name!r} must be a subclass of thinsection.predict.heads.Head, got "
            f"{head!r}; repair or remove the package that provides it"
        )
    return head


def build_head(settings: HeadConfig, dim: int, outputs: int) -> Head:
    """A new head for embeddings (D,), initialised from torch's generator.

    Args:
        settings: the head and its settings.
        dim: D.
        outputs: K; two for two classes, whose probabilities are a softmax.

    Raises ConfigError: no such head, or settings that do not fit.
    """
    for name in ("attention_dim", "num_heads", "instances"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"{name} must be >= 1, got {getattr(settings, name)}")
    if settings.hidden_dim < 0:
        raise ConfigError(f"hidden_dim must be >= 0, got {settings.hidden_dim}")
    if not 0 <= settings.dropout < 1:
        raise ConfigError(f"dropout must be in [0, 1), got {settings.dropout}")
    head = load_head(settings.head)
    with naming_part("head", settings.head, head):
        return head(dim, outputs, settings)


class Thresholds(nn.Module):
    """Logarithms of the class probabilities (..., K) of scores (..., 1), K classes in order."""

    def __init__(self, num_classes: int) -> None:
        """Sets thresholds that make all classes equally probable for a score of 0."""
        super().__init__()
        shares = torch.arange(1, num_classes) / num_classes
        even = torch.logit(shares)
        self.first = nn.Parameter(even[:1].clone())
        self.log_gaps = nn.Parameter(even.diff().log())

    def forward(self, score: Tensor) -> Tensor:
        """Log probabilities, without a difference of two that are nearly equal."""
        gaps = self.log_gaps.float().exp()
        thresholds = torch.cat(
            [self.first.float(), self.first.float() + gaps.cumsum(0)]
        )
        below = F.logsigmoid(thresholds - score.float())  # log P(class <= k)
        above = F.logsigmoid(score.float() - thresholds)  # log P(class > k)
        # s(a) - s(b) = s(a) s(-b) (1 - exp(b - a))
        between = torch.log(-torch.expm1(-gaps))
        middle = below[..., 1:] + above[..., :-1] + between
        return torch.cat([below[..., :1], middle, above[..., -1:]], dim=-1)


class OrdinalHead(Head):
    """Logits are the log probabilities of ordered classes; evidence (N, 1) is that of the score."""

    def __init__(self, dim: int, outputs: int, settings: HeadConfig) -> None:
        super().__init__(dim, outputs, settings)
        if settings.head in _BY_CLASS:
            raise ConfigError(
                f"head must not be {' or '.join(_BY_CLASS)} for an ordinal target, got "
                f"{settings.head!r}: its instance loss has no order; use 'abmil', or the task "
                "multiclass"
            )
        self.score = build_head(settings, dim, 1)
        self.thresholds = Thresholds(outputs)
        self.bag_weight = self.score.bag_weight
        self.needs_cells = self.score.needs_cells
        self.reads_blocks = self.score.reads_blocks
        self.surveys = self.score.surveys
        self.reads_mean = self.score.reads_mean

    def __call__(
        self,
        embeddings: Tensor,
        coords: Tensor | None = None,
        covariates: Tensor | None = None,
    ) -> HeadOutput:
        """See `Head.__call__`; covariates add to the score, before it becomes classes."""
        output = self.score(embeddings, coords, covariates)
        return output._replace(logits=self.thresholds(output.logits))

    def forward(self, embeddings: Tensor, coords: Tensor | None = None) -> HeadOutput:
        """See `Head.forward`."""
        return self(embeddings, coords)

    def of_case(
        self, values: Sequence[Tensor], covariates: Tensor | None
    ) -> HeadOutput:
        """See `Head.of_case`."""
        output = self.score.of_case(values, covariates)
        return output._replace(logits=self.thresholds(output.logits))

    def survey(self, block: Tensor, so_far: Survey) -> Survey:
        """See `Head.survey`."""
        return self.score.survey(block, so_far)

    def of_block(self, block: Tensor, survey: Survey = ()) -> tuple[Tensor, ...]:
        """See `Head.of_block`."""
        return self.score.of_block(block, *((survey,) if self.surveys else ()))

    def of_values(self, *values: Tensor) -> HeadOutput:
        """See `Head.of_values`."""
        output = self.score.of_values(*values)
        return output._replace(logits=self.thresholds(output.logits))

    def extra_loss(
        self, output: HeadOutput, target: Tensor, criterion: Criterion
    ) -> Tensor:
        """The extra loss of the head of the score, whose scores become classes first."""

        def of_score(score: Tensor, label: Tensor) -> Tensor:
            return criterion(self.thresholds(score), label)

        return self.score.extra_loss(output, target, of_score)


def head_for(
    settings: HeadConfig, dim: int, target: Target, num_covariates: int = 0
) -> Head:
    """A new head for a target, embeddings (D,) and covariates of a case, see `build_head`."""
    outputs = len(target.names)
    head: Head
    if target.kind == "ordinal":
        head = OrdinalHead(dim, outputs, settings)
    else:
        head = build_head(settings, dim, outputs)
    if num_covariates:
        scored = _scored(head)
        scored.covariates = Covariates(num_covariates, scored.outputs)
    return head


def fit_covariates(head: Head, values: Tensor) -> None:
    """Sets the scale of a head's covariates from the training cases (n, C)."""
    covariates = _scored(head).covariates
    assert covariates is not None, "the head was built with covariates"
    covariates.fit(values)


def _scored(head: Head) -> Head:
    """The head whose logits are a sum: that of the score of ordered classes."""
    return head.score if isinstance(head, OrdinalHead) else head

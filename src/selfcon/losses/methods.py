"""The table of methods: everything the paper compares, each a row of sets. Reading the table needs no torch.

A new contrastive method is a new row; `docs/architecture.md` shows one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from selfcon.described import describe
from selfcon.errors import UsageError, unknown_name
from selfcon.losses.one_stage import OneStage, logits_loss
from selfcon.losses.parts import check_fields, with_own_parts
from selfcon.losses.sets import Term

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from selfcon.losses.objective import Gather, Memory, Tally


class NetworkOutput(Protocol):
    """What a loss needs of a network's output."""

    @property
    def names(self) -> list[str]: ...

    @property
    def logits(self) -> Mapping[str, Tensor]: ...

    def projections_bved(self, views: int = 1) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to train an encoder: what it wants of a batch and of the network, and its loss."""

    name: str
    paper: str
    views: int = 1
    uses_labels: bool = True
    uses_exits: bool
    terms: tuple[Term, ...] = ()
    views_apart: bool = False  # without labels: whether another view of a sample is a negative
    one_stage: OneStage | None = None

    def __post_init__(self) -> None:
        if isinstance(self.views, bool) or not isinstance(self.views, int) or self.views < 1:
            raise UsageError(f"{self.name} must have one view or more, not {self.views!r}.")
        if self.one_stage is not None and (self.terms or self.views != 1 or not self.uses_labels):
            raise UsageError(f"{self.name} trains in one stage, of one view with labels, and has no terms of its own.")
        if self.one_stage is None and not self.terms and self.has_terms:
            raise UsageError(f"{self.name} contrasts nothing: it needs a term.")
        if not self.uses_exits and any("G" in (term.anchors, term.positives) for term in self.terms):
            raise UsageError(f"{self.name} has a term of sub-networks (G) alone: uses_exits must be True.")

    @property
    def has_terms(self) -> bool:
        """Whether the loss is that of its terms; a class may have one of its own."""
        return type(self).loss is Method.loss

    @property
    def stages(self) -> int:
        """1 where the classifier is trained with the encoder, 2 where a probe follows the pretraining."""
        return 2 if self.one_stage is None else 1

    def loss(
        self,
        features: Tensor,
        labels: Tensor | None = None,
        *,
        temperature: float | Tensor = 0.1,
        alpha: float = 1.0,
        base_temperature: float | None = None,
        implementation: str = "auto",
        gather: Gather = None,
        process_group: ProcessGroup | None = None,
        tally: Tally | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """The contrastive loss of features [B, V, E, D] and labels [B], a scalar.

        `selfcon.losses.contrastive_loss` says what the options do. Methods of the backbone alone look at exit 0 only,
        of `memory`, too.
        """
        from selfcon.losses.objective import check_features, check_memory, contrastive_loss

        if self.one_stage is not None:
            raise UsageError(
                f"{self.name} needs logits, not only features: use loss_from_output(network_output, labels)."
            )
        if self.uses_labels and labels is None:
            raise UsageError(f"{self.name} needs labels.")
        check_features(features, "BVED")
        if features.shape[1] != self.views:
            raise UsageError(
                f"{self.name} contrasts {self.views} view{'s' * (self.views > 1)} of each sample, and features of the "
                f"shape {list(features.shape)} hold {features.shape[1]} (their shape is [B, V, E, D])."
            )
        labels = labels if self.uses_labels else None
        if memory is not None and not self.uses_exits:
            remembered, known = check_memory(memory, features, labels)
            memory = remembered[:, :1], known
        return contrastive_loss(
            features if self.uses_exits else features[:, :, :1],
            labels,
            self.terms,
            temperature=temperature,
            alpha=alpha,
            base_temperature=base_temperature,
            implementation=implementation,
            gather=gather,
            process_group=process_group,
            tally=tally,
            views_apart=self.views_apart,
            memory=memory,
        )

    def loss_from_output(
        self,
        output: NetworkOutput,
        labels: Tensor | None = None,
        *,
        temperature: float | Tensor = 0.1,
        alpha: float = 1.0,
        base_temperature: float | None = None,
        implementation: str = "auto",
        gather: Gather = None,
        process_group: ProcessGroup | None = None,
        tally: Tally | None = None,
    ) -> Tensor:
        """Return the loss of a network's output; the options are those of `loss`.

        A method with two views needs two views per image, all first views and then all second views, and one label per
        image: `loss_from_output(net(torch.cat([first_views, second_views])), labels)`. As many labels as rows of the
        output are refused. Without labels, a batch with one view per image cannot be recognized: the loss would pair
        unrelated images. In one stage, the options apply to the contrastive part, if there is one.
        """
        if output.names[0] != "backbone":
            raise UsageError(f"{self.name} needs the backbone's output, and this one stops at {output.names[-1]}.")
        if self.uses_exits and len(output.names) < 2:
            raise UsageError(f"{self.name} needs a sub-network: create the model with exits=[selfcon.Exit(...)].")
        options: dict[str, Any] = {
            "temperature": temperature,
            "alpha": alpha,
            "base_temperature": base_temperature,
            "implementation": implementation,
            "gather": gather,
            "process_group": process_group,
            "tally": tally,
        }
        if self.one_stage is None:
            features = output.projections_bved(self.views)
            self._check_labels_per_view(features.shape[0] * self.views, labels)
            return self.loss(features, labels, **options)
        from selfcon.losses.gather import weigh_share, world_size

        if labels is None:
            raise UsageError(f"{self.name} needs labels.")
        if not output.logits:
            raise UsageError(f"{self.name} needs logits: create the model with num_classes.")
        alone = gather is False or world_size(process_group) == 1
        loss = logits_loss(output.logits, labels, self.one_stage, finite=alone)
        if gather is not False:
            loss = weigh_share(loss, len(labels), process_group)
        if self.one_stage.contrast:
            selfcon = get_method("selfcon").loss(output.projections_bved(self.views), labels, **options)
            loss = loss + self.one_stage.contrast * selfcon
        return loss

    def _check_labels_per_view(self, rows: int, labels: Tensor | None) -> None:
        """Refuse one label per row of the output where an image has several rows."""
        if self.views == 1 or labels is None:
            return
        shape = getattr(labels, "shape", None)  # a list has none
        if (len(labels) if shape is None else (*shape, None)[0]) == rows:
            views = "two" if self.views == 2 else self.views
            raise UsageError(
                f"{self.name} needs {views} views per image, all first views and then all second views, but got {rows} "
                f"labels for {rows} rows of the network's output. Run the network on torch.cat([first_views, "
                f"second_views]), and pass one label per image."
            )


def list_methods(*, released: bool = False) -> list[str]:
    """The names of all methods of the paper, sorted; or of those that its released code has otherwise."""
    return sorted(_RELEASED if released else _METHODS)


def get_method(name: str) -> Method:
    """The method of that name; `list_methods()` names them all."""
    try:
        return {**_METHODS, **_RELEASED}[name]
    except (KeyError, TypeError):
        raise unknown_name("method", name, [*_METHODS, *_RELEASED]) from None


def add_method(method: Method) -> Method:
    """Make a method known by its name, so that `--method` and `selfcon.fit` take it in this process.

    Modules in its fields (`nn.Module`) are trained with the network and kept in checkpoints; each run begins with them
    as they are now. A run remembers what the method was, and is not gone on with by another one of the same name. One
    that was added before is replaced.
    """
    if (method.name in _METHODS and method.name not in _ADDED) or method.name in _RELEASED:
        raise UsageError(f"There is a method {method.name!r} already: choose another name.")
    check_fields(method)
    _METHODS[method.name] = with_own_parts(method)
    _ADDED[method.name] = describe(method)
    return method


def describe_added(name: str) -> dict[str, Any] | None:
    """What an added method was when it was added, to tell it from another of its name; None of the table's."""
    return _ADDED.get(name)


class _Absent(Method):
    """A method of a script that is not at work: what it wants is known, its loss is not."""

    def loss(self, *_: Any, **__: Any) -> Tensor:
        raise UsageError(f"The loss of {self.name} is in the script that added it: train with that.")


@contextmanager
def standing_in(name: str, described: Mapping[str, Any] | None) -> Iterator[None]:
    """While it lasts, a method that a script added is known without it, for what needs no loss.

    `described` is what a run keeps of it.
    """
    if not isinstance(described, Mapping) or name in _METHODS:
        yield
        return
    _METHODS[name] = _Absent(
        name=name,
        paper="",
        views=described.get("views", 1),
        uses_labels=bool(described.get("uses_labels", True)),
        uses_exits=bool(described.get("uses_exits")),
        one_stage=None if described.get("one_stage") is None else OneStage(),
    )
    try:
        yield
    finally:
        del _METHODS[name]


_BACKBONE = Term(anchors="F", positives="F", negatives="F")
_ALL = Term(anchors="F+G", positives="F+G", negatives="F+G")
_REST = Term(anchors="F", positives="F", negatives="F", share="rest")
_G_TO_F = Term(anchors="G", positives="F", negatives="F+G")
_G_TO_F_ALPHA = Term(anchors="G", positives="F", negatives="F+G", share="alpha")
_G_TO_ALL_ALPHA = Term(anchors="G", positives="F+G", negatives="F+G", share="alpha")

_METHODS: dict[str, Method] = {
    method.name: method
    for method in [
        # Two stages, with labels
        Method(name="supcon", paper="Eq. 1", views=2, uses_exits=False, terms=(_BACKBONE,)),
        Method(name="supcon-s", paper="SupCon-S, Section 5", uses_exits=False, terms=(_BACKBONE,)),
        Method(name="selfcon", paper="Eq. 2", uses_exits=True, terms=(_ALL,)),
        Method(name="selfcon-m", paper="SelfCon-M, Section 5", views=2, uses_exits=True, terms=(_ALL,)),
        Method(name="selfcon-star", paper="SelfCon*, Appendix C.2", uses_exits=True, terms=(_REST, _G_TO_F_ALPHA)),
        Method(
            name="selfcon-m-star",
            paper="SelfCon-M*, Appendix C.2",
            views=2,
            uses_exits=True,
            terms=(_REST, _G_TO_ALL_ALPHA),
        ),
        # Two stages, without labels
        Method(
            name="simclr", paper="L_sim, Appendix C.1", views=2, uses_labels=False, uses_exits=False, terms=(_BACKBONE,)
        ),
        Method(name="selfcon-su", paper="SelfCon-SU, Appendix C.1", uses_labels=False, uses_exits=True, terms=(_ALL,)),
        Method(
            name="selfcon-mu",
            paper="SelfCon-MU, Appendix C.1",
            views=2,
            uses_labels=False,
            uses_exits=True,
            terms=(_ALL,),
        ),
        Method(
            name="selfcon-su-star",
            paper="SelfCon-SU*, Appendix C.2",
            uses_labels=False,
            uses_exits=True,
            terms=(_G_TO_F,),
        ),
        Method(
            name="selfcon-mu-star",
            paper="SelfCon-MU*, Appendix C.2",
            views=2,
            uses_labels=False,
            uses_exits=True,
            terms=(_REST, _G_TO_ALL_ALPHA),
        ),
        # One stage
        Method(name="ce", paper="CE", uses_exits=False, one_stage=OneStage()),
        Method(name="ce-sub", paper="CE w/ Sub, Appendix D", uses_exits=True, one_stage=OneStage(cross_entropy=1.0)),
        Method(
            name="sd",
            paper="SD, Appendix D",
            uses_exits=True,
            one_stage=OneStage(cross_entropy=0.5, distillation=0.5, softening=3.0),
        ),
        Method(
            name="selfcon-1stage",
            paper="SelfCon, Appendix D",
            uses_exits=True,
            one_stage=OneStage(cross_entropy=1.0, contrast=0.8),
        ),
    ]
}

_ADDED: dict[str, dict[str, Any]] = {}

_RELEASED: dict[str, Method] = {
    # The released code takes the other view of a sample for a negative, where the paper has it for a positive.
    "selfcon-mu-released": replace(_METHODS["selfcon-mu"], name="selfcon-mu-released", views_apart=True),
}

"""Decode steps with memory at fixed addresses, which a CUDA graph replays.

A step of a few thousand small kernels takes a GPU less time than Python takes to launch them. A graph launches all of
them at once. It reads and writes the same memory each time: the rows' numbers come in one buffer, edits read the
tensors of a static plan, and the values of places go to a stage, from where they are copied once for all. The number of
rows is rounded up; padding rows write to a page of their own.

Without a GPU the same steps run without a graph. Graphs have not been run on a GPU yet.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from deployments.engine.edit_plans import Effects, StaticPlan, signature
from deployments.engine.edits import Signature
from deployments.engine.kv_memory import KvMemory, pages_for
from deployments.engine.scheduler import Chunk
from deployments.model.batch import FIELDS, Batch, TokenSpan
from deployments.model.device_memory import is_broken, is_out_of_memory
from deployments.model.model import Model
from deployments.model.packing import TOLERANCE, relative_error
from deployments.places.hook_site import HookSite

SIZES = (1, 2, 4, *range(8, 129, 8))  # of the rows of a step; above these, multiples of the largest distance
SPACING = 32
MOST_STEPS = 64  # sets of rows, places and edits that are kept
MOST_PLAN_BYTES = 256 << 20  # of the vectors of edits in these; those of the last step are kept even if they have more
LAYER_OUTPUT = re.compile(r"layers\.\d+\.output")
WARM_UPS = 2  # uses of a step before it is captured: libraries allocate memory and choose functions in these

logger = logging.getLogger(__name__)


def padded(rows: int) -> int:
    """The number of rows with padding."""
    return next((size for size in SIZES if size >= rows), -(-rows // SPACING) * SPACING)


@dataclass(eq=False)
class DecodeStep:
    """A decode step for a number of rows, places and kinds of edits.

    Attributes:
        rows: The number of rows with padding.
        places: The places whose values go to the stage.
        plan: The edits, which steps of other numbers of rows and other places share.
        came: The places that the model's forward pass reached.
        uses: How often it has run.
        uses_tables: Whether its attention read tables of the batch in host memory, which a graph would not renew.
        captured: The graph, and its [rows, vocabulary] logits.
    """

    rows: int
    places: Sequence[HookSite]
    plan: StaticPlan
    came: set[HookSite] = field(default_factory=set)
    uses: int = 0
    uses_tables: bool = False
    captured: tuple[torch.cuda.CUDAGraph, torch.Tensor] | None = None


class DecodeSteps:
    """The decode steps of an engine.

    Attributes:
        stage: The values [rows, ...] of places in the step that ran last.
    """

    def __init__(self, model: Model, memory: KvMemory, most_rows: int, graphs: bool) -> None:
        """Allocate the memory of steps of at most `most_rows` rows; with `graphs` they are captured as CUDA graphs."""
        self._rows = padded(most_rows)
        self.stage: dict[HookSite, torch.Tensor] = {}
        self._layers = frozenset(point.place for point in model.points if LAYER_OUTPUT.fullmatch(point.name))
        self._model = model
        self._memory = memory
        self._graphs = graphs
        self._steps: OrderedDict[tuple[int, frozenset[HookSite], Signature], DecodeStep] = OrderedDict()
        numbers = FIELDS * self._rows + most_rows * pages_for(model.context) + 1
        self._buffer = torch.zeros(numbers, dtype=torch.int32, device=model.device)
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def find(self, chunks: Sequence[Chunk], places: Sequence[HookSite]) -> DecodeStep | None:
        """The step for these decodes, places to read, and edits; None if the forward pass must run otherwise."""
        kinds = signature(chunks)
        if kinds is None or any(place.grows for place in places):
            return None
        rows, wanted = padded(len(chunks)), frozenset(places)
        if wanted:  # most requests then share one graph; copying a layer's output takes little time
            wanted |= self._layers
        key = rows, wanted, kinds
        if key not in self._steps:
            for place in wanted - self.stage.keys():
                shape = self._rows, *place.shape
                self.stage[place] = torch.zeros(shape, dtype=place.dtype, device=self._model.device)
            plan = next((step.plan for (*_, other), step in self._steps.items() if other == kinds), None)
            plan = plan or StaticPlan(kinds, self._rows, self._model.device)
            self._steps[key] = DecodeStep(rows, sorted(wanted, key=lambda place: place.order), plan)
            while self._are_too_many():
                self._steps.popitem(last=False)
        self._steps.move_to_end(key)
        return self._steps[key]

    def _are_too_many(self) -> bool:
        plans = {step.plan for step in self._steps.values()}
        return len(self._steps) > MOST_STEPS or (len(plans) > 1 and sum(plan.bytes for plan in plans) > MOST_PLAN_BYTES)

    def run(
        self,
        step: DecodeStep,
        chunks: Sequence[Chunk],
        ids: Sequence[int],
        spans: Sequence[TokenSpan],
        tokens: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Effects]:
        """Run a step from `find`, and leave the values of its places in the stage.

        Args:
            step: The step.
            chunks: The chunks.
            ids: Their token ids.
            spans: Their spans.
            tokens: [chunks] token ids on the device instead.

        Returns:
            [rows, vocabulary] logits, which the next step overwrites, and what is to be added to the edits.
        """
        step.plan.fill(chunks)
        page, device = self._memory.padding_page, self._model.device
        batch = Batch(ids, spans, None, device, padded=step.rows, padding_page=page, buffer=self._buffer)
        if tokens is not None:
            batch.feed(tokens)
        step.uses += 1
        if step.captured:
            graph, logits = step.captured
            graph.replay()
        elif self._graphs and step.uses == WARM_UPS:
            logits = self._tried(step, batch)
        elif self._graphs and step.uses > WARM_UPS and not step.uses_tables:
            logits = self._captured(step, batch)
        else:
            logits = self._forward(step, batch)
        return logits, step.plan.effects()

    def _tried(self, step: DecodeStep, batch: Batch) -> torch.Tensor:
        """Run a step that is captured next; if it waits for the GPU, no step is captured, because that would fail.

        A failed capture leaves torch's allocator in a state that it does not leave again. Not run on a GPU yet.
        """
        restore = self._memory.cache.states.saved(batch.slots)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self._forward(step, batch)
        except RuntimeError as error:
            if is_broken(error) or is_out_of_memory(error):
                raise
            self._give_up(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        restore()
        return self._forward(step, batch)

    def _captured(self, step: DecodeStep, batch: Batch) -> torch.Tensor:
        """Run a step, capture it, and use the graph from now on if it gives the same. Not run on a GPU yet."""
        restore = self._memory.cache.states.saved(batch.slots)
        eager = self._forward(step, batch).clone()
        self._capture(step, batch)
        if step.captured:
            graph, logits = step.captured
            restore()
            graph.replay()
            differing = relative_error(logits.nan_to_num(), eager.nan_to_num())
            if not differing <= TOLERANCE.get(eager.dtype, 1e-1):
                self._give_up(f"its logits differ by {differing:.1%} of their norm")
                restore()
                eager = self._forward(step, batch)
        return eager

    def _give_up(self, reason: Exception | str) -> None:
        logger.warning("decode steps run without CUDA graphs, because one cannot be captured: %s", reason)
        self._graphs = False
        for step in self._steps.values():
            step.captured = None

    def _capture(self, step: DecodeStep, batch: Batch) -> None:
        """Capture a step, which does not run it; if that fails, no step is captured any more. Not run on a GPU yet."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # others copy rows
                logits = self._forward(step, batch)
        except Exception as error:  # of an unusual model
            torch.cuda.set_stream(stream)  # a failed capture leaves its own
            if is_broken(error) or is_out_of_memory(error):
                raise
            self._give_up(error)
        else:
            step.captured = graph, logits

    def _forward(self, step: DecodeStep, batch: Batch) -> torch.Tensor:
        staged = set(step.places)
        step.came.clear()

        def visit(place: HookSite, value: torch.Tensor) -> torch.Tensor | None:
            new = step.plan.apply(place, value)
            if place in staged:
                step.came.add(place)
                self.stage[place][: step.rows] = value if new is None else new
            return new

        logits = self._model.forward(batch, self._memory.cache, [*step.places, *step.plan.places], visit)
        step.uses_tables = batch.has_tables
        return logits

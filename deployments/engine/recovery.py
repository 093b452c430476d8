"""Recovery from a failed forward pass: as few sequences as possible end."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.engine.capture.ring import CaptureRing
from deployments.engine.kv_memory import KvMemory
from deployments.engine.output_processor import OutputProcessor
from deployments.engine.scheduler import Chunk, Scheduler
from deployments.engine.sequence import Sequence as EngineSequence
from deployments.engine.statistics import Statistics
from deployments.model.device_memory import mib


class Recovery:
    """Finds the failing sequence, or makes the next forward passes smaller."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: KvMemory,
        ring: CaptureRing,
        statistics: Statistics,
        output: OutputProcessor,
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._ring = ring
        self._statistics = statistics
        self._output = output

    def recover(self, chunks: Sequence[Chunk], failed: str, out_of_memory: str | None) -> None:
        """Prepare the next forward passes, and end the sequences that cannot run.

        Args:
            chunks: The chunks of the failed forward pass.
            failed: What went wrong.
            out_of_memory: The memory held and requested, if memory ran out.
        """
        chunks = [chunk for chunk in chunks if chunk.sequence in self._scheduler.running]
        for chunk in chunks:
            if chunk.sequence.fed == chunk.sequence.length:  # run, but its next token was not drawn
                chunk.sequence.fed -= 1  # its last token runs again
        if out_of_memory is None:
            if len(chunks) > 1:
                self._scheduler.suspect(chunks)
                return
            for chunk in chunks:
                self._output.finish(chunk.sequence, "error", failed)
            return
        self._statistics.out_of_memory += 1
        relieved = self._relieve(chunks)
        self._memory.trim()
        for chunk in [] if relieved else chunks:
            seq = chunk.sequence
            size = mib(self._memory.most_held(seq.need) * self._memory.position_bytes + self._memory.slot_bytes)
            message = (
                f"out of memory: {out_of_memory}; this request has {len(seq.request.prompt)} prompt and "
                f"{len(seq.tokens)} generated tokens of up to {seq.request.max_tokens}, "
                f"{size} of keys and values: shorten the prompt or lower max_tokens"
            )
            self._output.finish(seq, "error", message, "out_of_memory")

    def preempt(self, seq: EngineSequence) -> None:
        """Move a sequence back to the queue with its recorded rows."""
        if seq.recording:
            self._ring.leave(seq.recording)
        self._scheduler.preempt(seq)

    def _relieve(self, chunks: Sequence[Chunk]) -> bool:
        """Make the next forward passes smaller than one that ran out of memory; false if that is not possible."""
        scheduler = self._scheduler
        prompts = [chunk for chunk in chunks if not chunk.sequence.decodes]
        if prompts and scheduler.halve_tokens(sum(chunk.count for chunk in prompts)):
            return True
        if prompts and len(scheduler.running) > len(prompts):  # the others hold the memory: wait until they end
            leaving = prompts
        else:
            by_arrival = sorted(chunks, key=lambda chunk: chunk.sequence.arrival)
            leaving = by_arrival[(len(by_arrival) + 1) // 2 :]
        for chunk in reversed(leaving):
            self.preempt(chunk.sequence)
        scheduler.limit_sequences(len(scheduler.running))
        if leaving or len(chunks) != 1:
            return bool(leaving)
        last = chunks[0].sequence
        once_more = last.no_memory_at != last.length  # retry once with the memory released meanwhile
        last.no_memory_at = last.length
        return once_more

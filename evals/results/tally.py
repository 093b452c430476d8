"""Counts of samples, a few bytes for each: of one condition, of one mode, and of what was recorded."""

from array import array
from collections import Counter, defaultdict
from decimal import Decimal
from typing import Any

from evals.activations_meta import bytes_of, points_of, runs_of, tokens_of, why_not_stored
from evals.scoring import RULES, SCORING, Rule
from evals.stats import clustered, covered, pass_at, proportion, quantiles
from evals.task.trajectory import TIMEOUT, Outcome, Sample

OUTCOMES: tuple[Outcome, ...] = ("correct", "wrong", "invalid", "truncated", "timed_out", "turn_limit", "failed")
MOST_REASONS = 20  # that are listed one by one
OTHER = "other reasons"
Vote = tuple[str | Decimal | None, bool]  # an answer's value, None without one, and whether it is correct


class ConditionTally:
    """Samples of one mode and variant."""

    def __init__(self, rule: Rule) -> None:
        """Initializes all counts at 0.

        Args:
            rule: the run's, which decides what is correct.
        """
        self.correct: defaultdict[str, list[bool]] = defaultdict(list)  # by problem; failed ones are not in it
        self.presets: Counter[str] = Counter()  # by name, that answers were made with
        self.outcomes: Counter[str] = Counter()
        self.unrewarded = 0  # samples that count and have no reward, because a function failed
        self._rule: Rule = rule
        self._counts: Counter[str] = Counter()
        self._right: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by rule and problem
        self._votes: defaultdict[str, Counter[Vote]] = defaultdict(Counter)
        self._first: defaultdict[str, dict[Vote, int]] = defaultdict(dict)  # the epoch that first had the vote
        self._latencies = array("d")  # seconds
        self._tokens = array("l")
        self._rewards: defaultdict[str, float] = defaultdict(float)
        self._reward = 0.0

    def add(self, sample: Sample) -> None:
        """Counts one sample."""
        self.outcomes[sample.outcome] += 1
        self._counts["prompt"] += sample.prompt_tokens
        self._counts["completion"] += sample.completion_tokens
        self._counts["reasoning"] += sum(turn.reasoning_tokens for turn in sample.turns)
        self.presets.update(turn.preset or "none" for turn in sample.turns)
        self.unrewarded += sample.outcome != "failed" and sample.reward is None
        if sample.correct is None:
            return
        if sample.turns:
            self._latencies.append(sample.latency_s)
        if sample.completion_tokens:  # else the server counts none: they are not known
            self._tokens.append(sample.completion_tokens)
        self.correct[sample.id].append(sample.correct)
        for rule in RULES:
            self._right[rule][sample.id] += sample.correct_by(rule)
        answer = sample.answer(self._rule)
        vote = None if answer is None else SCORING[self._rule].value(answer)  # `18.0` and `18` are one vote
        self._votes[sample.id][vote, sample.correct] += 1
        first = self._first[sample.id]
        first[vote, sample.correct] = min(sample.epoch, first.get((vote, sample.correct), sample.epoch))
        self._counts.update(
            answered=1,
            thought=bool(sample.reasoning),
            invalid=answer is None,
            truncated=sample.finish_reason == "length",
            timed_out=sample.finish_reason == TIMEOUT,
            turn_limit=sample.turn_limit,
            rewarded=sample.reward is not None,
        )
        self._reward += sample.reward or 0.0
        for name, value in sample.rewards.items():
            self._rewards[name] += value

    def summary(self) -> dict[str, Any]:
        """The condition's part of summary.json; all but counts and sums is of the samples that did not fail.

        Returns:
            mode: `no-tools` or `with-tools`.
            variant: The prompt variant, or the steered condition.
            strict: `correct` of `of` answers by `strict`, `accuracy`, `stderr`, `ci95`.
            flexible: These numbers by `flexible`.
            normalized: These numbers by `normalized`.
            epochs: With several answers to a problem, `most` of them, `pass_at` k and the `majority`'s accuracy.
            samples: All samples.
            failed: Samples without a usable response.
            invalid: Answers without a number by the rule.
            truncated: Answers cut at a limit of tokens.
            timed_out: Answers that took too long.
            turn_limit: Conversations that ended at the last turn.
            outcomes: Samples by their outcome.
            invalid_rate: Share of `invalid`.
            truncated_rate: Share of `truncated`.
            prompt_tokens: Tokens of all prompts.
            completion_tokens: New tokens of all turns.
            reasoning: `samples` with reasoning, and its `tokens`.
            presets: Responses by the preset that they name.
            completion_tokens_per_sample: `mean`, `p50`, `p95` of the samples with an answer to the first turn.
            latency_s: `p50` and `p95` of these samples.
            rewards: The mean of each reward.
            reward: The mean weighted sum.
        """
        answered, rewarded, tokens = self._counts["answered"], self._counts["rewarded"], sum(self._tokens)
        of = [len(each) for each in self.correct.values()]
        return {
            **{rule: clustered([self._right[rule][i] for i in self.correct], of) for rule in RULES},
            "epochs": self._epochs(of),
            "samples": self.outcomes.total(),
            "failed": self.outcomes["failed"],
            **{kind: self._counts[kind] for kind in ("invalid", "truncated", "timed_out", "turn_limit")},
            "outcomes": {kind: self.outcomes[kind] for kind in OUTCOMES},
            "invalid_rate": self._counts["invalid"] / answered if answered else None,
            "truncated_rate": self._counts["truncated"] / answered if answered else None,
            "prompt_tokens": self._counts["prompt"],
            "completion_tokens": self._counts["completion"],
            "reasoning": {"samples": self._counts["thought"], "tokens": self._counts["reasoning"]},
            "presets": dict(self.presets),
            "completion_tokens_per_sample": {
                "mean": tokens / len(self._tokens) if self._tokens else None,
                **quantiles(self._tokens),
            },
            "latency_s": quantiles(self._latencies),
            "rewards": {name: total / rewarded for name, total in self._rewards.items()},
            "reward": self._reward / rewarded if rewarded else None,
        }

    def _epochs(self, of: list[int]) -> dict[str, Any] | None:
        """What several answers to a problem come to: pass@k, and the answer that most of them give."""
        most = max(of, default=1)
        if most == 1:
            return None
        hits = [sum(each) for each in self.correct.values()]
        ks = [k for k in (1, 2, 4, 8, 16, 32, 64, 128) if k < most] + [most]
        elected = [self._elected(problem) for problem in self._votes]
        majority = proportion(sum(correct for _, correct in elected), len(of))
        return {"most": most, "pass_at": {str(k): pass_at(k, hits, of) for k in ks}, "majority": majority}

    def _elected(self, problem: str) -> Vote:
        """The most frequent vote; in a tie, that of the earliest epoch.

        Answers without a value count only if there are no others.
        """
        votes, first = self._votes[problem], self._first[problem]
        return max(votes, key=lambda vote: (vote[0] is not None, votes[vote], -first[vote]))


def unswept(summary: dict[str, Any]) -> dict[str, Any]:
    """The conditions of a summary without those of a sweep, which its heat map shows."""
    steered = {pair["b"] for pair in summary["paired"] if pair["kind"] == "steering"} if summary.get("sweep") else ()
    return {key: condition for key, condition in summary["conditions"].items() if key not in steered}


class ModeTally:
    """When the samples of one mode ran, and what they made."""

    def __init__(self) -> None:
        self.started, self.ended = array("d"), array("d")  # seconds since the epoch
        self._tokens = 0

    def add(self, sample: Sample) -> None:
        """Counts one sample."""
        self.started.append(sample.started)
        self.ended.append(sample.ended)
        self._tokens += sample.completion_tokens

    def summary(self) -> dict[str, Any]:
        """The mode's part of summary.json."""
        wall = covered(self.started, self.ended)
        return {
            "samples": len(self.started),
            "completion_tokens": self._tokens,
            "wall_s": wall,
            "tokens_per_second": self._tokens / wall if wall and self._tokens else None,
        }


class ActivationTally:
    """What was recorded, by the server's own answers."""

    def __init__(self, session_id: str) -> None:
        """Initializes all counts at 0.

        Args:
            session_id: of the runs.
        """
        self._session_id = session_id
        self._counts: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._why: Counter[str] = Counter()
        self._points: set[str] = set()
        self._files: set[str] = set()
        self._example: dict[str, str] | None = None
        self._bytes: int | None = 0

    def add(self, sample: Sample) -> None:
        """Counts the runs of one sample."""
        for turn in sample.turns:
            meta = turn.activations or {}
            self._statuses[str(meta.get("status", "missing"))] += 1
            if why := why_not_stored(turn.activations):
                self._why[why if why in self._why or len(self._why) < MOST_REASONS else OTHER] += 1
                continue
            for run in runs_of(meta):
                self._add_run(run)

    def _add_run(self, run: dict[str, Any]) -> None:
        self._counts += Counter(runs=1, tokens=tokens_of(run))
        for name, at in points_of(run).items():
            self._points.add(name)
            if isinstance(uri := at.get("uri"), str):
                self._files.add(uri)
                self._example = self._example or {"uri": uri, "run_id": run["run_id"], "point": name}
            size = bytes_of(at)
            self._bytes = None if self._bytes is None or size is None else self._bytes + size

    def summary(self) -> dict[str, Any]:
        """The activations' part of summary.json.

        Returns:
            session_id: The session.
            points: The recorded points.
            runs: Stored runs.
            tokens: Their tokens.
            bytes: Bytes of their tensors; null if dtypes and shapes do not determine them (attention patterns).
            where: Directories of the files.
            files: Number of files.
            answers: Responses in all.
            statuses: Responses by the status that the server reports.
            not_stored: Responses with another status than `stored`.
            why_not_stored: These by the server's reason.
            example: `uri`, `run_id` and `point` of one run.
            transferred: `path`, `bytes`, `files` and `runs` of the copy in the results directory; null without one.
        """
        return {
            "session_id": self._session_id,
            "points": sorted(self._points),
            "runs": self._counts["runs"],
            "tokens": self._counts["tokens"],
            "bytes": self._bytes,
            "where": sorted({uri.rpartition("/")[0] for uri in self._files}),
            "files": len(self._files),
            "answers": self._statuses.total(),
            "statuses": dict(self._statuses),
            "not_stored": self._why.total(),
            "why_not_stored": dict(self._why.most_common()),
            "example": self._example,
        }

"""A cluster under load, one fault after another: `make chaos`, or `make chaos CHAOS=9 SEED=3` for some of them."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.chaos.cluster import SERVER, SETTLE_S, Chaos
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.judge import restless, wrong_requests, wrong_runs
from tests.chaos.load import CLIENTS, PROMPTS, Load, Sent, ask
from tests.machines import ROOT
from tests.waiting import until

NUMBERS, SEED = os.environ.get("CHAOS"), int(os.environ.get("SEED") or 1)
CHOSEN = [FAULTS[int(number) - 1] for number in NUMBERS.split(",")] if NUMBERS else FAULTS
TABLE = ROOT / "build" / "chaos.md"
COLUMNS = ("fault", "what clients saw", "seconds to the first good answer", "lost")

pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    if not shutil.which("redis-server"):
        pytest.skip("no redis-server here")
    try:
        made = Chaos(tmp_path_factory.mktemp("chaos"))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', b'').decode() or error}")
    with made.serving():
        yield made


@pytest.fixture(scope="module")
def texts(cluster: Chaos) -> list[str]:
    """The answers of all prompts, without faults."""
    sent = [Sent(number) for number in range(len(PROMPTS))]

    async def send() -> None:
        async with httpx.AsyncClient(base_url=SERVER, headers=cluster.headers, timeout=None) as http:
            for each in sent:
                await ask(http, each)

    cluster.client(lambda: asyncio.run(send())).result()
    assert all(each.good for each in sent), sent
    return [each.text for each in sent]


@pytest.fixture(scope="module")
def table() -> Iterator[list[tuple[str, ...]]]:
    """The rows of what clients saw, which end in a file."""
    rows: list[tuple[str, ...]] = [COLUMNS, ("---",) * len(COLUMNS)]
    yield rows
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("".join(f"| {' | '.join(row)} |\n" for row in rows))


@pytest.mark.parametrize("fault", CHOSEN, ids=[fault.name.replace(" ", "-") for fault in CHOSEN])
def test_clients_get_what_is_promised(fault: Fault, cluster: Chaos, texts: list[str], table: list[tuple[str, ...]]):
    load = Load(cluster, re.sub(r"[^a-z0-9]+", "-", fault.name), SEED, texts)
    load.start()
    until(lambda: len(load.good(0)) >= 2 * CLIENTS, limit_s=SETTLE_S, describe=lambda _: f"{load.ledger}")
    began = time.monotonic()
    fault.do(cluster)
    first = until(lambda: load.good(began), limit_s=SETTLE_S, describe=lambda _: f"no answer: {load.ledger[-9:]}")[0]
    until(cluster.whole, limit_s=SETTLE_S, describe=lambda _: f"not whole: {cluster.health()}")
    healed = time.monotonic()
    until(lambda: len(load.good(healed)) >= 2 * CLIENTS, limit_s=SETTLE_S, describe=lambda _: f"{load.ledger[-9:]}")
    load.stop()
    until(lambda: not restless(cluster), limit_s=SETTLE_S, describe=lambda _: f"not at rest: {restless(cluster)}")
    runs = wrong_runs(cluster, load.session, load.ledger)
    seconds = first.at + first.took_s - began
    seen = ", ".join(f"{count} {outcome}" for outcome, count in Counter(sent.outcome for sent in load.ledger).items())
    table.append((fault.name, seen, f"{seconds:.1f}", str(sum(line.startswith(("lost", "damaged")) for line in runs))))
    wrong = wrong_requests(load.ledger) + runs
    assert not wrong, "\n".join(wrong)
    assert seconds < fault.limit_s

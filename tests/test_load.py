"""The load benchmark, small: every answer under load is the one that the same request gets alone."""

import asyncio
import os

from serving import NEST, served, wait_until

from benchmarks.load import load, table
from nestling.engine.engine import Engine


def test_answers_under_load_are_those_that_requests_get_alone():
    with Engine(NEST) as engine, served(engine) as server:
        asked = load(server.place, members=engine.members, clients=8, seconds=3, num_kinds=12, pid=os.getpid())
        tally = asyncio.run(asked)
        wait_until(lambda: not engine.stats().tokens_in_flight and not server.app.hall.deliveries)
    assert not tally.wrong
    assert tally.finished > 8
    assert tally.cancelled
    assert table(tally, clients=8, seconds=3).count("\n") == 2

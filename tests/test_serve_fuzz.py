"""Requests that nobody would think of, drawn from the server's OpenAPI document: none fails the server, none hangs."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from serving import NEST, served

from nestling.engine.engine import Engine

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore")
def test_no_request_fails_the_server_or_hangs():
    with Engine(NEST) as engine, served(engine) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")

        for found in schema.get_all_operations():
            operation = found.ok()

            @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            @given(case=operation.as_strategy())
            def ask(case):
                answer = case.call(base_url=server.url, timeout=20)
                assert answer.status_code < 500, answer.text

            ask()

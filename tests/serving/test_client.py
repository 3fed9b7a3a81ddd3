"""OpenAI's client against the server."""

from __future__ import annotations

import client_checks
import pytest


@pytest.mark.parametrize("check", client_checks.CHECKS, ids=lambda check: check.__name__)
def test_client(client, check):
    check(client, "tiny")

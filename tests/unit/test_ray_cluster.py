"""Addresses at which no Ray cluster is."""

from __future__ import annotations

import socket

import pytest

from expert_iteration.errors import UserError

pytest.importorskip("ray")


def test_an_address_where_nothing_or_something_else_answers_is_told_within_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from expert_iteration.runtime.ray import cluster

    monkeypatch.setattr(cluster, "ANSWER_LIMIT_S", 5.0)
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = listening.getsockname()[1], closed.getsockname()[1]
        closed.close()
        for port in ports:
            with pytest.raises(UserError) as caught:
                cluster.start({"address": f"127.0.0.1:{port}"})
            [problem] = caught.value.problems
            assert str(problem).startswith(
                f"ray.init_config.address=127.0.0.1:{port}: no Ray cluster answers there within 5 s; start one by"
            )

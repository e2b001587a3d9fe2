from __future__ import annotations

from typing import Any

import pytest

from kvferry.cluster.runtime import START_TRIES, bundles, start_ray, strategy
from kvferry.core.config import parse_config
from kvferry.core.errors import StartupError
from kvferry.engine.wiring import config_on_host


class FakeInit:
    """A ``ray.init`` that raises what it is given, one per call, and then comes up."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **options: Any) -> None:
        self.calls.append(options)
        if self.errors:
            raise self.errors.pop(0)


SLOW = Exception("The current node timed out during startup.")


def test_a_ray_that_is_slow_to_come_up_is_tried_again() -> None:
    init = FakeInit(SLOW, RuntimeError("Timed out waiting for file gcs_server_port"))
    start_ray(parse_config({}), "/clean", init)
    assert len(init.calls) == 3
    assert init.calls[-1]["runtime_env"] == {"working_dir": "/clean"}


def test_tries_are_bounded_and_other_errors_are_final() -> None:
    slow = FakeInit(*[SLOW] * 100)
    with pytest.raises(StartupError, match=r"ray_address local: Ray does not start: .*timed out"):
        start_ray(parse_config({}), "/clean", slow)
    assert len(slow.calls) == START_TRIES
    absent = FakeInit(ConnectionError("no cluster\nhere"))
    with pytest.raises(StartupError, match=r"ray_address auto: .*no cluster here"):
        start_ray(parse_config({"cluster": {"ray_address": "auto"}}), "/clean", absent)
    assert len(absent.calls) == 1


def test_ray_has_room_for_all_workers_whatever_the_host_has() -> None:
    config = parse_config({"prefill": {"workers": 2, "threads": 3}, "decode": {"threads": 2}})
    assert bundles(config) == [{"CPU": 3.0}, {"CPU": 3.0}, {"CPU": 2.0}]
    init = FakeInit()
    start_ray(config, "/clean", init)
    assert init.calls[0]["num_cpus"] == 8.0
    joined = FakeInit()
    start_ray(parse_config({"cluster": {"ray_address": "auto"}}), "/clean", joined)
    assert "num_cpus" not in joined.calls[0]


def test_the_ranks_of_a_worker_share_a_bundle_and_so_a_host() -> None:
    pools = {"prefill": {"tp": 4, "threads": 2, "workers": 2}, "decode": {"tp": 2}}
    assert bundles(parse_config(pools)) == [{"CPU": 8.0}, {"CPU": 8.0}, {"CPU": 2.0}]
    on_gpus = bundles(parse_config({**pools, "cluster": {"device": "cuda"}}))
    assert [bundle["GPU"] for bundle in on_gpus] == [4.0, 4.0, 2.0]


def test_hosts_that_have_a_role_get_workers_of_that_role() -> None:
    config = parse_config({"prefill": {"workers": 2}})
    marked = bundles(config, {"CPU": 8.0, "prefill": 1.0, "decode": 1.0, "head": 1.0})
    roles = [next((key for key in bundle if key != "CPU"), "") for bundle in marked]
    assert roles == ["prefill", "prefill", "decode"]
    assert sum(bundle.get("prefill", 0.0) for bundle in marked) < 1
    half = bundles(config, {"CPU": 8.0, "decode": 1.0})
    assert [sorted(bundle) for bundle in half] == [["CPU"], ["CPU"], ["CPU", "decode"]]


@pytest.mark.parametrize(
    ("transport", "expected"), [("auto", "PACK"), ("tcp", "PACK"), ("shm", "STRICT_PACK")]
)
def test_workers_share_a_host_only_where_kv_needs_it(transport: str, expected: str) -> None:
    assert strategy(parse_config({"transfer": {"transport": transport}})) == expected


def test_a_worker_s_own_address_stands_in_for_node() -> None:
    values = parse_config({"prefill": {"host": "node"}}).model_dump()
    known = config_on_host(values, lambda: "192.0.2.7")
    assert (known.prefill.host, known.decode.host) == ("192.0.2.7", "127.0.0.1")

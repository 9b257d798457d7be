"""The configuration by itself: values, layers, the ladder of time-outs, where the controller is."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.core import config as c
from everstep.core.config import Logs, RunConfig, Std, check, job_spec, std_of
from everstep.core.endpoint import Hosting, controller_address, owns_address, parse_endpoint, place_controller
from everstep.core.errors import ExitCode, UsageError
from everstep.core.layers import Resolved, Setting, from_set, from_toml, known_keys, resolve, to_toml
from everstep.core.types import JobSpec


def resolved(*sets: str) -> RunConfig:
    return resolve(map(from_set, sets)).config


def refused(*sets: str) -> str:
    with pytest.raises(UsageError) as caught:
        resolved(*sets)
    assert caught.value.code == ExitCode.USAGE
    return str(caught.value)


def toml(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


def test_defaults_pass_their_own_checks_and_agree_with_the_controllers() -> None:
    check(RunConfig())
    spec = job_spec(RunConfig(), "j")
    assert spec == msgspec.structs.replace(JobSpec("j"), script="")


def test_job_spec_carries_every_field() -> None:
    config = resolved(
        "nodes.min=2", "nodes.max=4", "restart.max_restarts=7", "restart.grace_s=3", "restart.crash_loop=5",
        "control.join_timeout_s=61", "control.last_call_s=1.5", "control.reconnect_s=0.25", "control.lease_s=4",
        "control.recover_s=5", "control.stop_margin_s=2", "control.fence_s=33", "hang.timeout_s=9",
        "expect_steps=12", "worker.target=train.py",
    )  # fmt: skip
    assert job_spec(config, "j") == JobSpec(
        job="j", min_nodes=2, max_nodes=4, max_restarts=7, grace_s=3, join_timeout_s=61, last_call_s=1.5,
        reconnect_s=0.25, lease_s=4, recover_s=5, stop_margin_s=2, fence_s=33, crash_loop=5, hang_timeout_s=9,
        expect_steps=12, script="train.py",
    )  # fmt: skip


def test_later_layers_win_and_are_remembered(tmp_path: Path) -> None:
    file = from_toml(toml(tmp_path, "expect_steps = 5\n[nodes]\nmin = 1\nmax = 3\n[env]\n'A.B' = 'x'\n"))
    outcome = resolve([file, {"nodes.max": Setting("4", "--nnodes", text=True)}, from_set("env.C=3")])
    assert (outcome.config.nodes.min, outcome.config.nodes.max, outcome.config.expect_steps) == (1, 4, 5)
    assert outcome.config.env == {"A.B": "x", "C": "3"}
    assert outcome.origins["nodes.max"] == "--nnodes"
    assert outcome.origins["nodes.min"] == str(tmp_path / "job.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[nodes]\nmni = 2", "unknown key 'nodes.mni'; did you mean 'nodes.min'?"),
        ("max_restarts = 2", "unknown key 'max_restarts'; did you mean 'restart.max_restarts'?"),
        ("[node]\nmin = 2", "unknown key 'node'; did you mean"),
        ("[nodes]\nmin = 'two'", "nodes.min = 'two': expected a whole number at least 1"),
        ("[nodes]\nmin = '2'", "nodes.min = '2': expected a whole number at least 1"),
        ("[nodes]\nnproc_per_node = 'all'", "expected a whole number at least 1 or one of auto, cpu, gpu, xpu"),
        ("[restart]\ngrace_s = inf", "expected a finite number"),
        ("nodes = 3", "nodes is a group of settings: write [nodes]"),
        ("env = 3", "env = 3: expected a table of NAME = VALUE"),
        ("[worker]\nargs = 'x'", "expected a list, each a string"),
        ("[worker]\nzygote = 1", "expected true or false"),
        ("[nodes\n", "not valid TOML"),
    ],
)
def test_a_wrong_file_says_where_what_and_how(tmp_path: Path, text: str, said: str) -> None:
    path = toml(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        resolve([from_toml(path)])
    assert said in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: cannot be read: No such file"):
        from_toml(tmp_path / "none.toml")


def test_set_reads_toml_and_falls_back_to_a_string() -> None:
    config = resolved(
        "nodes.nproc_per_node=auto", "logs.role=a b=c", "worker.preload=['numpy', \"x\"]", "worker.zygote=false",
        "control.lease_s=5", 'env={A = "1"}', "rendezvous.conf.is_host=true", "logs.redirects=3", "logs.tee=0:1",
    )  # fmt: skip
    assert (config.nodes.nproc_per_node, config.logs.role) == ("auto", "a b=c")
    assert (config.worker.preload, config.worker.zygote, config.control.lease_s) == (("numpy", "x"), False, 5.0)
    assert (config.env, config.rendezvous.conf) == ({"A": "1"}, {"is_host": "true"})
    assert (config.logs.redirects, config.logs.tee) == ("3", "0:1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes.min", "expected KEY=VALUE"),
        ("nodes=3", "nodes is a group of settings"),
        ("nodes.mim=3", "did you mean 'nodes.min'"),
        ("control.leese_s=3", "did you mean 'control.lease_s'"),
        ("nodes.min=0", "--set: nodes.min = 0: expected a whole number at least 1"),
        ("worker.kind=class", "expected one of script, module, program"),
        ("restart.signals=['SIGKILL']", "'SIGKILL' is not a signal that can be handled"),
        ("nodes.node_rank=1", "ranks of nodes count from 0"),
        ("control.tls_cert=x", "belong together"),
        ("logs.tee=0:4", "logs.tee (--set) = '0:4': expected 0 (none)"),
    ],
)
def test_a_wrong_set_is_refused(text: str, said: str) -> None:
    assert said in refused(text)


@pytest.mark.parametrize(
    ("sets", "low", "high"),
    [
        (["control.heartbeat_s=4"], "control.heartbeat_s = 4 (--set)", "control.lease_s = 10 (the default)"),
        (["control.lease_s=12"], "control.lease_s = 12 (--set)", "control.recover_s = 10 (the default)"),
        (["control.reconnect_s=11"], "control.reconnect_s = 11 (--set)", "control.lease_s = 10 (the default)"),
        (["control.fence_s=9"], "control.recover_s = 10 (the default)", "control.fence_s = 9 (--set)"),
        (["hang.timeout_s=5", "hang.save_s=4"], "hang.timeout_s = 5 (--set)", "hang.save_s = 4 (--set)"),
    ],
)
def test_the_ladder_of_timeouts_names_both_numbers(sets: list[str], low: str, high: str) -> None:
    said = refused(*sets)
    assert "time-outs in the wrong order" in said
    assert low in said
    assert high in said


def test_every_rung_of_the_ladder_is_a_known_key() -> None:
    for inner, _, outer, _ in c.LADDER:
        assert {inner, outer} <= known_keys().keys()


def test_a_long_hang_timeout_lifts_the_limits_nobody_set() -> None:
    hang = resolved("hang.timeout_s=3600", "hang.save_s=4000").hang
    assert (hang.first_step_s, hang.save_s, hang.eval_s) == (3600, 4000, 3600)


def test_local_nodes_are_the_job_unless_nnodes_says_otherwise() -> None:
    assert resolved("nodes.local_nodes=3").nodes == c.Nodes(min=3, max=3, local_nodes=3)
    assert resolved("nodes.local_nodes=2", "nodes.max=4").nodes == c.Nodes(min=1, max=4, local_nodes=2)
    assert "nodes.local_nodes = 2 (--set) must not be above nodes.max = 1 (--set)" in refused(
        "nodes.local_nodes=2", "nodes.max=1"
    )
    assert "nodes.min = 3 (--set) must not be above nodes.max = 2" in refused("nodes.min=3", "nodes.max=2")


def test_the_rendezvous_id_names_the_job() -> None:
    assert resolved("rendezvous.id=team/run 7").job == "team-run-7"
    assert resolved("rendezvous.id=x", "job=y").job == "y"
    assert "job = a/b (--set): expected letters" in refused("job=a/b")


def test_streams_on_the_console() -> None:
    assert Logs().console(0) == Std.ALL
    assert Logs(redirects="3").console(1) == Std.NONE
    assert Logs(redirects="0:1,1:2").console(0) == Std.ERR
    assert Logs(redirects="0:1,1:2").console(1) == Std.OUT
    assert Logs(redirects="0:1,1:2").console(2) == Std.ALL
    assert Logs(redirects="3", tee="1:1").console(1) == Std.OUT
    assert Logs(local_ranks_filter=(1,)).console(0) == Std.NONE
    for text in ("4", "", "0:4", "0:1,", "a"):
        with pytest.raises(UsageError, match=r"logs\.tee"):
            std_of(text, "logs.tee", 0)


def strings() -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(
    args=st.lists(strings(), max_size=3),
    env=st.dictionaries(strings(), strings(), max_size=3),
    grace=st.floats(0, 1e20),
)
def test_the_dry_run_text_reads_back(args: list[str], env: dict[str, str], grace: float) -> None:
    import tomllib

    config = RunConfig(
        worker=c.Worker(args=tuple(args)),
        env=env,
        restart=c.Restart(grace_s=grace),
        nodes=c.Nodes(nproc_per_node="cpu"),
    )
    again = msgspec.convert(tomllib.loads(to_toml(Resolved(config, {"nodes.min": "--nnodes"}))), RunConfig)
    assert again == config


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node1", ("node1", 29400)),
        ("node1:1", ("node1", 1)),
        ("localhost:0", ("localhost", 0)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("fe80::1", ("fe80::1", 29400)),
        ("[fe80::1]", ("fe80::1", 29400)),
        ("[fe80::1]:5", ("fe80::1", 5)),
    ],
)
def test_endpoints(text: str, address: tuple[str, int]) -> None:
    assert parse_endpoint(text, 29400, "k") == address


@pytest.mark.parametrize("text", ["", "a:b", "a:70000", "a:1:2", "http://a:1", ":5", "a b"])
def test_wrong_endpoints_name_the_key(text: str) -> None:
    with pytest.raises(UsageError, match=r"^the\.key = "):
        parse_endpoint(text, 29400, "the.key")


def place(*sets: str, mine: str = "") -> tuple[str, int, Hosting]:
    host, port, hosting, why = place_controller(resolved(*sets), lambda host: host == mine)
    assert why
    return host, port, hosting


def test_a_job_of_one_machine_hosts_on_any_free_loopback_port() -> None:
    here = ("127.0.0.1", 0, Hosting.HOST)
    assert place() == here
    assert place("rendezvous.backend=c10d") == here
    assert place("rendezvous.standalone=true", "rendezvous.endpoint=other:1") == here
    assert place("nodes.local_nodes=2") == here
    assert place("rendezvous.master_port=29501", "nodes.node_rank=0") == here  # two such jobs do not meet
    endpoint = "rendezvous.endpoint=localhost:29400"
    assert place("rendezvous.backend=c10d", endpoint, mine="localhost") == ("localhost", 29400, Hosting.HOST)
    assert place("rendezvous.backend=c10d", "rendezvous.endpoint=localhost:0", mine="localhost")[1:] == (
        0,
        Hosting.HOST,
    )


def test_the_owner_of_the_endpoint_hosts_and_others_join() -> None:
    settings = ("nodes.max=2", "rendezvous.backend=c10d", "rendezvous.endpoint=n0")
    assert place(*settings, mine="n0") == ("n0", 29400, Hosting.TRY)
    assert place(*settings, mine="n1") == ("n0", 29400, Hosting.JOIN)
    assert place(*settings, "rendezvous.conf.is_host=1", mine="n1") == ("n0", 29400, Hosting.HOST)
    assert place(*settings, "rendezvous.conf.is_host=false", mine="n0") == ("n0", 29400, Hosting.JOIN)
    assert place(*settings, "control.controller=n1:7", mine="n1") == ("n1", 7, Hosting.TRY)


def test_static_rendezvous_goes_by_node_rank() -> None:
    settings = ("nodes.max=2", "rendezvous.master_addr=n0", "rendezvous.master_port=1234")
    assert place(*settings, "nodes.node_rank=0", mine="none") == ("n0", 1234, Hosting.HOST)
    assert place(*settings, "nodes.node_rank=1", mine="n0") == ("n0", 1234, Hosting.JOIN)
    assert place(*settings, mine="n0") == ("n0", 1234, Hosting.TRY)
    assert place("nodes.max=2", "rendezvous.master_addr=n0", mine="n0")[1] == 29500
    with pytest.raises(UsageError, match="--master-port"):
        controller_address(resolved("nodes.max=2", "rendezvous.master_addr=n0:1"))


def test_a_free_port_nobody_can_know_is_refused() -> None:
    with pytest.raises(UsageError, match="which the other nodes cannot know"):
        place("nodes.min=2", "nodes.max=2", "control.controller=me:0", mine="me")
    with pytest.raises(UsageError, match="is no address of this machine"):
        place("control.controller=other:0", mine="me")


def test_owned_addresses() -> None:
    assert owns_address("localhost")
    assert owns_address("127.0.0.2")
    assert not owns_address("192.0.2.1")  # TEST-NET-1: nobody's
    assert not owns_address("no-such-host.invalid")

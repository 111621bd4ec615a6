"""The command line: what it prints, what it writes, and how it fails."""

import json
import sys

import pytest
import torch
from page_checks import assert_self_contained
from typer.testing import CliRunner

import iternorm
from iternorm import bench, cli
from iternorm.__main__ import main
from iternorm.experiments.demo import runs as demo
from iternorm.timing.cpu import comparison
from iternorm.timing.cpu.devices import Case


@pytest.fixture
def tiny_bench(monkeypatch):
    """`bench.run` on one tiny case."""
    real_run, real_count = bench.run, bench.count_timings

    def candidates(num_channels):
        return bench.standard_candidates(num_channels, group_sizes=(4,), dbn_group_sizes=(4,), num_iters=(5,))

    small = {"cases": [Case((4, 8, 3, 3))], "candidates": candidates}
    monkeypatch.setattr(bench, "run", lambda **kwargs: real_run(**small, **kwargs))
    monkeypatch.setattr(bench, "count_timings", lambda **kwargs: real_count(**small, **kwargs))
    monkeypatch.setattr(comparison, "set_malloc_thresholds", lambda: True)


def test_version(invoke):
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"iternorm {iternorm.__version__}\n"


def test_help_names_the_verbs(invoke):
    result = invoke("--help")
    assert result.exit_code == 0
    assert "demo" in result.stdout
    assert "bench" in result.stdout


def test_demo_prints_a_table_and_writes_a_page(invoke, tmp_path):
    result = invoke("demo", "--epochs", 2, "--seed", 3, "--seeds", 2, "--out", tmp_path / "new")
    assert result.exit_code == 0, result.output
    for word in ("none", "BN", "DBN", "IterNorm", "condition", str(tmp_path / "new" / "report.html")):
        assert word in result.stdout
    assert_self_contained((tmp_path / "new" / "report.html").read_text(encoding="utf-8"))
    config = json.loads((tmp_path / "new" / "results.json").read_text())["config"]
    assert (config["epochs"], config["seeds"]) == (2, [3, 4])


def test_bench_prints_a_table_and_writes_json(invoke, tiny_bench, tmp_path):
    path = tmp_path / "deep" / "bench.json"
    result = invoke("bench", "--rounds", 2, "--threads", 1, "--json", path)
    assert result.exit_code == 0, result.output
    for word in ("4x8x3x3", "conv3x3", "BatchNorm2d", "DBN d=4", "IterNorm T=5 d=4", "authors' T=5 d=4", "glibc"):
        assert word in result.stdout
    written = json.loads(path.read_text())
    assert written["settings"]["rounds"] == 2
    assert written["provenance"]["machine"]["threads"] == 1
    assert len(written["cases"][0]["rivals"][0]["samples_ms"]) == 2


def test_bench_on_cuda_prints_the_gpus_tables_and_writes_json(invoke, monkeypatch, tmp_path):
    asked = []
    path = tmp_path / "new" / "gpu.json"

    def run(**arguments):
        arguments.pop("progress")("a part")
        arguments.pop("save")({"cases": ["one"]})
        assert json.loads(path.read_text()) == {"cases": ["one"]}
        asked.append(arguments)
        return {"cases": []}

    monkeypatch.setattr(bench, "check_arguments", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(bench.gpu, "run", run)
    monkeypatch.setattr(bench.gpu, "lines", lambda result: ["[bold]one", "two " * 40])
    result = invoke("bench", "--device", "cuda", "--rounds", 7, "--quick", "--json", path)
    assert result.exit_code == 0, result.output
    assert asked == [("cuda", 7, None, True, False, False, False), {"rounds": 7, "quick": True}]
    assert result.stdout.startswith("[bold]one\n" + "two " * 40)
    assert json.loads(path.read_text()) == {"cases": []}


@pytest.mark.parametrize(
    ("kind", "run_name", "lines_name"),
    [
        ("networks", "run_networks", "network_lines"),
        ("sync", "run_synchronized", "synchronized_lines"),
        ("roots", "run_roots", "root_lines"),
    ],
)
def test_bench_of_parts_writes_each_as_it_is_done(kind, run_name, lines_name, invoke, monkeypatch, tmp_path):
    path = tmp_path / "result.json"

    def run_parts(**arguments):
        arguments["progress"]("a part")
        arguments["save"]({kind: ["one"]})
        assert json.loads(path.read_text()) == {kind: ["one"]}
        assert arguments["rounds"] == 3
        return {kind: []}

    monkeypatch.setattr(bench, "check_arguments", lambda *arguments: None)
    monkeypatch.setattr(bench.gpu, run_name, run_parts)
    monkeypatch.setattr(bench.gpu, lines_name, lambda result: ["a line"])
    result = invoke("bench", "--device", "cuda", f"--{kind}", "--rounds", 3, "--json", path)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("a line\n")
    assert json.loads(path.read_text()) == {kind: []}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--sync"], "error: --sync times synchronized layers on a GPU, not on 'cpu'; add --device cuda\n"),
        (["bench", "--networks"], "error: --networks times training steps on a GPU, not on 'cpu'; add --device cuda\n"),
        (["bench", "--roots"], "error: --roots times roots of matrices on a GPU, not on 'cpu'; add --device cuda\n"),
        (["bench", "--quick"], "error: quick=True is for device='cuda'; on a CPU use fewer rounds\n"),
        (["demo", "--epochs", "0"], "error: epochs=0 trains nothing: use 1 or more\n"),
        (["demo", "--seed", "-1"], "error: seed=-1 is negative: use 0 or more\n"),
        (
            ["demo", "--seeds", "0"],
            "error: seeds=0 trains nothing: use 1 or more, and 3 or more for an error bar\n",
        ),
        (["bench", "--rounds", "0"], "error: rounds=0 times nothing: use 1 or more\n"),
        (["bench", "--device", "[red]tpu"], "error: device='[red]tpu' is not known here: use 'cpu' or 'cuda'\n"),
    ],
)
def test_a_users_error_is_one_line_and_exit_code_2(invoke, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_bench_on_cuda_without_a_device(invoke):
    result = invoke("bench", "--device", "cuda")
    assert result.exit_code == 2
    assert result.stderr == "error: device='cuda' needs a CUDA device and torch sees none: use device='cpu'\n"


def test_an_output_that_is_a_file_is_refused_before_the_work(invoke, tmp_path):
    (tmp_path / "file").touch()
    assert invoke("demo", "--out", tmp_path / "file").exit_code == 2
    assert invoke("bench", "--json", tmp_path).exit_code == 2


@pytest.mark.parametrize("arguments", [["demo", "--out", "file/new"], ["bench", "--json", "file/new.json"]])
def test_an_output_that_cannot_be_written_is_said_before_the_work(invoke, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for module, work in ((bench, "run"), (demo, "run")):
        monkeypatch.setattr(module, work, lambda **arguments: pytest.fail("work before the arguments were checked"))
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: file/new")
    assert "cannot be written: file is not a folder" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_traceback_on_request(invoke, monkeypatch):
    monkeypatch.setenv("ITERNORM_TRACEBACK", "1")
    result = invoke("bench", "--rounds", "0")
    assert isinstance(result.exception, ValueError)


@pytest.mark.parametrize("package", ["sklearn", "matplotlib"])
def test_demo_names_the_extra_that_is_missing(invoke, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(demo, "run", lambda **arguments: pytest.fail("work before the packages were looked for"))
    result = invoke("demo")
    assert result.exit_code == 2
    assert result.stderr == f"error: this needs {package}: pip install 'iternorm[demo]'\n"


def test_a_bug_is_not_taken_for_a_users_error(invoke, monkeypatch):
    monkeypatch.setattr(bench, "check_arguments", lambda *arguments: {}["missing"])
    assert isinstance(invoke("bench").exception, KeyError)


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_the_command_says_how_to_get_it(monkeypatch, capsys, package):
    for name in [name for name in sys.modules if name.startswith("iternorm.cli") or name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    assert capsys.readouterr().err == f"iternorm: the command line needs {package}: pip install 'iternorm[cli]'\n"


def test_main_runs_the_app(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["iternorm", "--version"])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 0
    assert "iternorm" in capsys.readouterr().out


@pytest.mark.parametrize(("encoding", "text"), [("ascii", "k 1.2 - 3 us ?"), ("cp1252", "k 1.2 – 3 µs ?")])
def test_letters_that_an_encoding_lacks_have_others_in_their_place(encoding, text):
    assert "κ 1.2 – 3 µs √".encode(encoding, errors="iternorm.plain_letters").decode(encoding) == text


def complete(line):
    """What bash is offered for the last word of a line."""
    words = line.split(" ")
    asked = {"_ITERNORM_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return CliRunner().invoke(cli.app, [], env=asked, prog_name="iternorm").stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("iternorm a", ["analyze"]),
        ("iternorm run figA", ["figA1", "figA2"]),
        ("iternorm run fig1 a", ["all"]),
        ("iternorm plot table", ["table1", "table2", "table3", "tableA1"]),
        ("iternorm run fig1 --device c", ["cpu", "cuda"]),
        ("iternorm analyze nets.py:net --data m", ["mnist"]),
        ("iternorm analyze nets.py:net --mode e", ["eval"]),
        ("iternorm bench --q", ["--quick"]),
    ],
)
def test_a_shell_completes_verbs_ids_and_choices(line, expected):
    assert complete(line) == expected


def test_help_says_how_to_install_completion(invoke):
    assert "--install-completion" in invoke("--help").stdout

"""What a CPU can show of the switches for GPUs: they do no harm, and say that they do nothing."""

import paddle
import pytest
from command_line import parse_arguments

from ppldm.config.recipe import defaults
from ppldm.families.ldm import LdmConfig
from ppldm.networks.cpu_operators.layers import plain_attention
from ppldm.training.commands.train import make_parser
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import ConfigError

needs_cpu = pytest.mark.skipif(paddle.is_compiled_with_cuda(), reason="shows what happens on a CPU")


def losses(tiny, folder, **changes):
    run = prepare(*parse_arguments(tiny.flags(folder, max_steps=3, **changes), loop=True))
    run_loop(run)
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")], run


@needs_cpu
def test_switches_change_nothing_on_a_cpu_and_say_so(tiny, tmp_path, caplog, monkeypatch):
    from ppldm.utils.log import get_logger

    monkeypatch.setattr(get_logger(), "propagate", True)
    plain, run = losses(tiny, tmp_path / "plain")
    assert "does nothing on a CPU" not in caplog.text
    assert {type(p) for p in run.state.model.unet.attn_processors.values()} == {type(plain_attention())}
    switched, _ = losses(tiny, tmp_path / "switched", tf32=True, cudnn_search=True, fused_adamw=True)
    assert switched == pytest.approx(plain, rel=1e-6)
    for name in ("tf32", "cudnn_search"):
        assert f"--{name} does nothing on a CPU" in caplog.text


@needs_cpu
def test_attention_for_gpus_is_refused_on_a_cpu(tiny, tmp_path):
    with pytest.raises(ConfigError, match="enable_xformers_memory_efficient_attention needs a GPU"):
        losses(tiny, tmp_path / "run", enable_xformers_memory_efficient_attention=True)


def test_all_are_off_by_default_and_help_says_how_to_turn_off_the_tuning_of_cpus():
    for loop in (True, False):
        usual = defaults(LdmConfig, loop)
        for name in ("tf32", "cudnn_search", "fused_adamw", "to_static"):
            assert usual[f"compute.{name}"] is False
        assert usual["model.enable_xformers_memory_efficient_attention"] is False
        assert "PPLDM_NO_CPU_TUNING=1" in make_parser(loop).format_help()


def test_the_benchmark_flag_adds_its_line(tiny, tmp_path, caplog, monkeypatch):
    from ppldm.utils.log import get_logger

    monkeypatch.setattr(get_logger(), "propagate", True)
    losses(tiny, tmp_path / "run", benchmark=True)
    (*_, last) = read_metrics(tmp_path / "run/metrics.jsonl")
    assert last["ips"] == last["images_per_second"] and last["avg_batch_cost"] > last["avg_reader_cost"] > 0
    line = f"avg_samples: 4, ips: {last['ips']:.5f} images/sec"
    assert line in caplog.text


def test_profiling_does_not_end_the_run(tiny, tmp_path):
    options = f"batch_range=[0,1];timer_only=False;profile_path={tmp_path / 'profile'}"
    assert len(losses(tiny, tmp_path / "run", profiler_options=options)[0]) == 3
    assert (tmp_path / "run/checkpoint-3").is_dir() and list((tmp_path / "profile").iterdir())

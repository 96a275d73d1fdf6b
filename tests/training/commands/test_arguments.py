"""Both command lines: the published ones verbatim, and helpful words for wrong ones."""

import dataclasses
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import make_recipe, parse_arguments, tree_of
from paddlenlp.trainer import TrainingArguments

from ppldm.config.option import options
from ppldm.config.recipe import groups_of
from ppldm.config.training import TrainingOptions
from ppldm.families.autoencoder import AutoencoderConfig
from ppldm.families.base import get_family
from ppldm.families.ldm import LdmConfig
from ppldm.methods.averages.ema import GradualDecay
from ppldm.methods.averages.ema_interval import IntervalDecay
from ppldm.training.commands.train import make_parser, names_of_trainer_flags, read_recipe, train
from ppldm.training.report import Reporter
from ppldm.training.rows import count_steps
from ppldm.utils.errors import ConfigError

KNOWN = {name: stated for group in groups_of(LdmConfig) for name, stated in options(group).items()}
ALIASES = {other: stated.name for stated in KNOWN.values() for other in stated.also}

# Reference: the published tutorial, sections 1.3.2 and 1.4.1 (the multi-card commands have the same flags).
PUBLISHED_TRAINER = """
    --do_train
    --output_dir ./laion400m_pretrain_output_trainer
    --per_device_train_batch_size 6
    --gradient_accumulation_steps 10
    --learning_rate 4.6875e-5
    --weight_decay 0.02
    --max_steps 1000000000
    --lr_scheduler_type "constant"
    --warmup_steps 0
    --logging_steps 50
    --save_steps 5000
    --save_total_limit 50
    --seed 23
    --dataloader_num_workers 6
    --model_name_or_path CompVis/ldm_laion400M_pretrain
    --file_list ./data/filelist/train.filelist.list
    --num_inference_steps 200
    --model_max_length 77
    --tokenizer_name bert-base-uncased
"""
PUBLISHED_LOOP = """
    --output_dir ./laion400m_pretrain_output_no_trainer
    --train_batch_size 6
    --gradient_accumulation_steps 10
    --learning_rate 4.6875e-5
    --adam_weight_decay 0.02
    --max_train_steps 1000000000
    --lr_scheduler "constant"
    --lr_warmup_steps 0
    --logging_steps 50
    --save_steps 5000
    --seed 23
    --num_workers 6
    --pretrained_model_name_or_path CompVis/ldm_laion400M_pretrain
    --file_list ./data/filelist/train.filelist.list
    --num_inference_steps 200
    --model_max_length 77
    --tokenizer_name bert-base-uncased
"""


@pytest.mark.parametrize("command, loop", [(PUBLISHED_TRAINER, False), (PUBLISHED_LOOP, True)])
def test_published_command_lines(command, loop):
    model, data, training = parse_arguments(shlex.split(command), loop)
    assert (training.per_device_train_batch_size, training.gradient_accumulation_steps) == (6, 10)
    assert training.learning_rate == 4.6875e-5 and training.weight_decay == 0.02
    assert training.max_steps == 10**9 and training.lr_scheduler_type == "constant" and training.warmup_steps == 0
    assert (training.logging_steps, training.save_steps, training.seed) == (50, 5000, 23)
    assert training.dataloader_num_workers == 6 and training.max_grad_norm <= 0
    assert model.model_name_or_path == "CompVis/ldm_laion400M_pretrain" and not model.starts_from_pipeline
    assert (model.num_inference_steps, model.model_max_length, model.tokenizer_name) == (200, 77, "bert-base-uncased")
    assert data.file_list == "./data/filelist/train.filelist.list" and data.resolution == 256


def test_defaults_of_the_two_scripts():
    _, data, loop = parse_arguments([], loop=True)
    assert (loop.output_dir, loop.per_device_train_batch_size, loop.gradient_accumulation_steps) == (
        "./output-model",
        6,
        10,
    )
    assert (loop.num_train_epochs, loop.max_steps, loop.dataloader_num_workers) == (100, -1, 6)
    assert (loop.learning_rate, loop.weight_decay, loop.save_steps, loop.logging_steps, loop.seed) == (
        5e-5,
        1e-2,
        5000,
        50,
        23,
    )
    assert (loop.adam_beta1, loop.adam_beta2, loop.adam_epsilon) == (0.9, 0.999, 1e-8)
    assert (data.num_records, data.buffer_size, data.shuffle_every_n_samples) == (10_000_000, 100, 5)
    _, _, trainer = parse_arguments(["--do_train", "--output_dir", "x"], loop=False)
    assert (trainer.lr_scheduler_type, trainer.max_grad_norm, trainer.weight_decay) == ("constant", -1.0, 0.0)


@pytest.mark.parametrize("alias, name", ALIASES.items())
@pytest.mark.parametrize("loop", [True, False])
def test_both_spellings_are_one_flag(alias, name, loop):
    words = {"pretrained_model_name_or_path": "some/folder", "lr_scheduler": "cosine", "writer_type": "none"}
    stated = KNOWN[name]
    share = stated.bounds is not None and stated.bounds.most == 1
    value = words.get(alias, "true" if stated.type is bool else "0.5" if share else "7")
    base = ["--do_train", "--output_dir", "x"]
    parsed = [parse_arguments([*base, f"--{flag}", value], loop) for flag in (alias, name)]
    assert parsed[0] == parsed[1]
    assert parse_arguments(base, loop) != parsed[0]


@pytest.mark.parametrize("schedule", ["cosine_with_restarts", "polynomial", "constant_with_warmup"])
def test_schedules_of_the_published_loop(schedule):
    assert parse_arguments(["--lr_scheduler", schedule], loop=True)[2].lr_scheduler_type == schedule


def test_new_model_flags():
    flags = "--vae_name_or_path v --text_encoder_config_file t --unet_config_file u --use_ema --prediction_type "
    flags += (
        "v_prediction --noise_offset 0.1 --image_logging_steps 5 --benchmark --recompute --bf16 --freeze_text_encoder"
    )
    for loop in (True, False):
        model, _, training = parse_arguments([*flags.split(), "--do_train", "--output_dir", "x"], loop)
        assert (model.vae_name_or_path, model.prediction_type, model.noise_offset) == ("v", "v_prediction", 0.1)
        assert (
            model.use_ema and model.freeze_text_encoder and training.benchmark and training.recompute and training.bf16
        )


@pytest.mark.parametrize("steps, every", [(-1, False), (0, False), (1, True)])
def test_pictures_are_drawn_at_no_update_where_none_is_said(steps, every):
    """0 and less are the same, as PaddleMIX has them."""
    run = SimpleNamespace(max_steps=3)
    model = parse_arguments(["--image_logging_steps", str(steps)], loop=True)[0]
    due = [Reporter._due(SimpleNamespace(run=run), step, model.image_logging_steps) for step in (1, 2, 3)]
    assert due == [every] * 3


def test_a_file_may_be_named_as_open_diffusion_does(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text("run: {seed: 7}")
    with pytest.raises(SystemExit):
        train([f"config={tmp_path}/mine.yaml", "data.resolution=32", "--print_config"])
    assert re.search(rf"^  seed: 7 +# {tmp_path}/mine.yaml:1$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize(
    "flags, steps",
    [
        ("--max_samples 96", 2),
        ("--num_examples_to_see 97", 3),
        ("--max_samples 1 --num_train_epochs 7", 1),
        ("--max_samples 97 --max_steps 3", 3),
        ("--max_steps 5", 5),
        ("--max_steps 0 --num_train_epochs 0.5", 11),
    ],
)
def test_the_budget_in_updates(loop, flags, steps):
    training = parse_arguments(["--do_train", "--output_dir", "x", *flags.split()], loop)[2]
    assert count_steps(training, 1010, 48) == steps


def test_two_budgets_that_differ_are_refused():
    training = parse_arguments(["--max_samples", "97", "--max_steps", "2"], loop=True)[2]
    with pytest.raises(ConfigError, match="--max_samples 97 is 3 updates of 48 samples, and --max_steps says 2"):
        count_steps(training, 1010, 48)


@pytest.mark.parametrize(
    "flags, decay",
    [
        ("", None),
        ("--use_ema", GradualDecay(0.9999)),
        ("--use_ema --ema_decay 0.5", GradualDecay(0.5)),
        ("--ema_start_iters 5000 --ema_iters 100 --ema_beta 0.9", IntervalDecay(5000, 100, 0.9)),
        ("--use_ema --ema_iters 7", IntervalDecay(5000, 7, 0.9)),
    ],
)
def test_forms_of_the_average(flags, decay):
    assert get_family("ldm").average(parse_arguments(flags.split(), loop=True)[0]) == decay


@pytest.mark.parametrize("loop", [True, False])
def test_the_loops_logging_dir_is_inside_its_output_dir_and_the_trainers_where_it_says(loop, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    flags = ["--output_dir", "o", "--do_train"]
    found = parse_arguments([*flags, "--logging_dir", "l"], loop)[2].log_folder
    assert found == (Path("o/l") if loop else tmp_path / "l")
    assert str(parse_arguments(flags, loop)[2].log_folder) == "o/logs"


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--recompte", "unknown flag --recompte; did you mean --recompute?"),
        ("--max_train_step 5", "did you mean --max_train_steps?"),
        ("--max_steps x", "--max_steps x must be a whole number"),
        ("--seed", "expected one argument"),
        ("stray", "unexpected argument 'stray'"),
        ("--lr_scheduler stairs", "--lr_scheduler_type stairs is not known; use one of constant, constant_with_warmup"),
        (
            "--prediction_type v_predict",
            "--prediction_type v_predict is not known; did you mean v_prediction? use one of ",
        ),
        ("--resolution 0", "--resolution 0 must be above 0"),
        ("--caption_drop 2", "--caption_drop 2.0 must be from 0 to 1"),
        ("--per_device_train_batch_size 0", "must be above 0"),
        ("--max_steps 0 --num_train_epochs 0", "--num_train_epochs 0.0 must be above 0"),
        ("--fp16 --bf16", "do not go together"),
        (
            "--pretrained_text_encoder_name clip --text_encoder_config_file x.json",
            "brings its own config; do not give --text_encoder_config_file",
        ),
        ("--seed -1", "--seed -1 must be from 0 to 18446744073709551615"),
        ("--to_static --recompute", "nothing is recomputed; omit one of them"),
        ("--sharding stage2 --fp16", "--sharding stage2 was never run with gradients in half precision"),
        ("--sharding stage2 --bf16 --fp16_opt_level O2", "was never run with gradients in half precision; use --sh"),
        ("--sharding stage2 --to_static", "--sharding stage2 was never run with --to_static; use --sharding stage1"),
        ("--sharding stage3 --fp16", "--sharding stage3 was never run with gradients in half precision"),
        ("--sharding stage3 --to_static", "--sharding stage3 was never run with --to_static; use --sharding stage1"),
        ("--sharding offload", "--sharding offload is not supported: shares stay on devices; use stage3"),
        ("--sharding stage4", "--sharding stage4 is not known; use stage1, stage2, stage3, or omit it"),
        ("--sharding stage1 --sharding_parallel_degree 2", "the hand-written loop has no --sharding_parallel_degree"),
        ("--unified_checkpoint", "--unified_checkpoint works for PaddleNLP's own model classes only"),
        ("--metric_for_best_model loss", "the hand-written loop has no --metric_for_best_model"),
        ("--model_name_or_path . --unet_config_file u", "is a whole pipeline"),
        ("--max_samples 0", "--max_samples 0 must be above 0"),
        ("--num_examples_to_see -1", "--max_samples -1 must be above 0"),
        ("--max_skipped_updates 0", "--max_skipped_updates 0 must be above 0"),
        ("--learning_rate 0", "--learning_rate 0.0 must be above 0"),
        ("--unet_learning_rate 0", "--unet_learning_rate 0.0 must be above 0"),
        ("--learning_rate nan", "--learning_rate nan must be above 0"),
        ("--adam_beta2 1", "--adam_beta2 1.0 must be at least 0 and below 1"),
        ("--adam_epsilon -1", "--adam_epsilon -1.0 must be 0 or more"),
        ("--weight_decay -1", "--weight_decay -1.0 must be 0 or more"),
        ("--warmup_steps -5", "--warmup_steps -5 must be 0 or more"),
        ("--warmup_ratio 2", "--warmup_ratio 2.0 must be from 0 to 1"),
        ("--num_cycles 0", "--num_cycles 0.0 must be above 0"),
        ("--num_workers -1", "--dataloader_num_workers -1 must be 0 or more"),
        ("--max_grad_norm nan", "--max_grad_norm nan must be a number"),
        ("--num_train_epochs inf", "--num_train_epochs inf must be above 0"),
        ("--fp16 --scale_loss 0", "--scale_loss 0.0 must be above 0"),
        ("--lr_scheduler piecewise_constant", "piecewise_constant with --lr_steps None: write factors"),
        ("--bf16 maybe", "--bf16 maybe must be true or false"),
        ("--logging_steps 0", "--logging_steps 0 must be above 0"),
        ("--save_total_limit -1", "--save_total_limit -1 must be 0 or more"),
        ("--max_skipped -1", "--max_skipped -1 must be 0 or more"),
        ("--rank_timeout -1", "--rank_timeout -1.0 must be 0 or more"),
        ("--num_workers 100000", "--dataloader_num_workers 100000: this machine has "),
        ("--model_name_or_path /nope --unet_config_file x", "/nope is not here, so it must be a pipeline on a hub"),
        ("--profiler_options x", '--profiler_options x is not understood; write "batch_range='),
        ("--profiler_options exit_on_finished=true", "would end the run without a checkpoint; omit it"),
        ("--validation_guidance_scales 1 nan", "--validation_guidance_scales nan must be a number"),
        ("--lr_batch_size 512", "--lr_batch_size does nothing without --scale_lr"),
        ("--fp16_opt_level O0", "--fp16_opt_level O0 is not known; did you mean O2? use one of O1, O2"),
        ("--snr_gamma 0", "--snr_gamma 0.0 must be above 0"),
        ("--snr_gamma nan", "--snr_gamma nan must be above 0"),
        ("--noise_offset -0.1", "--noise_offset -0.1 must be 0 or more"),
        ("--input_perturbation nan", "--input_perturbation nan must be 0 or more"),
        ("--rescale_betas_zero_snr", "add --prediction_type v_prediction"),
        ("--ema_beta 1.5", "--ema_beta 1.5 must be from 0 to 1"),
        ("--ema_iters 0", "--ema_iters 0 must be above 0"),
        (
            "--report_to tensorbord",
            "--report_to tensorbord is not known; did you mean tensorboard? use one of visualdl, tens",
        ),
    ],
)
def test_wrong_flags_are_named(flags, message):
    with pytest.raises(ConfigError) as caught:
        parse_arguments(flags.split(), loop=True)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags, needed",
    [
        ("--scale_loss 1024 --bf16", "--scale_loss does nothing without --fp16"),
        ("--fp16_opt_level O2", "--fp16_opt_level does nothing without --bf16 or --fp16"),
        ("--num_cycles 2", "--num_cycles does nothing without --lr_scheduler_type cosine"),
        ("--min_lr 1e-6 --lr_scheduler polynomial", "--min_lr does nothing without --lr_scheduler_type cosine"),
        ("--lr_steps 1:9,0 --lr_scheduler cosine", "--lr_steps does nothing without --lr_scheduler_type piecewise_c"),
        ("--lr_end 1e-6 --lr_scheduler cosine", "--lr_end does nothing without --lr_scheduler_type polynomial"),
        ("--ema_decay 0.9", "--ema_decay does nothing without --use_ema"),
        (
            "--freeze_text_encoder --text_encoder_learning_rate 1e-3",
            "--text_encoder_learning_rate does nothing without a text encoder that is trained",
        ),
        ("--validation_rows 9", "--validation_rows does nothing without --validation_file_list"),
        ("--validation_prompts x --image_logging_steps -1", "--validation_prompts does nothing without --image_log"),
        ("--validation_prompts x --image_logging_steps 0", "--validation_prompts does nothing without --image_logging"),
        ("--ema_decay 0.9 --use_ema --fp16 --fp16_opt_level O2 --scale_loss 9 --lr_scheduler polynomial --power 2", ""),
    ],
)
def test_flags_without_effect_are_named(flags, needed, capsys):
    parse_arguments(flags.split(), loop=True)
    warnings = capsys.readouterr().err
    assert needed in warnings if needed else not warnings


@pytest.mark.parametrize("flags", ["--optim adamw_mini", "--metric_for_best_model loss", "--logging_strategy epoch"])
def test_the_trainer_ignores_no_flag_silently(flags):
    base = ["--do_train", "--output_dir", "x"]
    assert parse_arguments([*base, "--skip_profile_timer", "false"], loop=False)
    with pytest.raises(ConfigError, match=f"the Trainer script has no use for {flags.split()[0]}; omit it"):
        parse_arguments([*base, *flags.split()], loop=False)


@pytest.mark.parametrize("loop", [True, False])
def test_every_flag_of_paddlenlps_trainer_is_taken_at_its_default_or_refused_by_name(loop):
    """Those that are options of ours mean what they say; of the others, none is ignored and none is unknown."""
    fields = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    assert names_of_trainer_flags() == fields.keys()
    base, refused = ["--do_train", "--output_dir", "x"], set()
    for name in fields.keys() - options(TrainingOptions).keys():
        hint = str(fields[name].type)
        value = "true" if "bool" in hint else "7" if "int" in hint else "steps" if "Strategy" in hint else "word"
        if fields[name].default is True or fields[name].default == "steps":
            value = "false" if fields[name].default is True else "epoch"
        with pytest.raises(ConfigError, match=f"--{name}[ ;]") as caught:
            parse_arguments([*base, f"--{name}", value], loop)
        assert str(caught.value).endswith("; omit it")
        refused.add(name)
    assert len(refused) > 60
    assert parse_arguments([*base, "--logging_strategy", "steps", "--past_index", "-1", "--bf16"], loop)[2].bf16


def test_flags_of_the_other_script_are_taken_at_their_default():
    assert parse_arguments(["--release_grads", "false", "--skip_profile_timer"], loop=True)
    with pytest.raises(ConfigError, match="the hand-written loop has no --release_grads; omit it"):
        parse_arguments(["--release_grads"], loop=True)
    assert parse_arguments(["--do_train", "--output_dir", "x", "--release_grads"], loop=False)[2].release_grads


def test_an_unknown_word_beside_a_flag_of_the_trainers_is_unknown():
    with pytest.raises(ConfigError, match="unknown flag --sharding_degre"):
        parse_arguments(["--logging_strategy", "steps", "--sharding_degre", "2"], loop=True)


@pytest.mark.parametrize(
    "flags, value",
    [
        ("--random_crop false", False),
        ("--random_crop", True),
        ("--no_random_crop", False),
        ("--random_crop=NO", False),
        ("--no_random_crop --random_crop", True),
        ("", True),
    ],
)
def test_forms_of_a_switch(flags, value):
    assert parse_arguments(flags.split(), loop=True)[1].random_crop is value


@pytest.mark.parametrize(
    "flags, value",
    [
        ("--bucket_no_upscale", False),
        ("--bucket_no_upscale false", True),
        ("--bucket_no_upscale=Yes", False),
        ("--bucket_upscale --bucket_no_upscale", False),
        ("--bucket_no_upscale --bucket_upscale", True),
        ("", False),
    ],
)
def test_a_published_flag_may_be_the_opposite(flags, value):
    assert parse_arguments([*flags.split(), "--buckets", "ratios"], loop=True)[1].bucket_upscale is value
    with pytest.raises(ConfigError, match="maybe must be true or false"):
        parse_arguments(["--bucket_no_upscale", "maybe"], loop=True)
    with pytest.raises(ConfigError, match="its opposite is called data.bucket_upscale here"):
        parse_arguments(["data.bucket_no_upscale=true"], loop=True)


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("config", [LdmConfig, AutoencoderConfig])
def test_the_help_explains_every_option_of_the_script_and_no_other(loop, config):
    text = " ".join(make_parser(loop, config).format_help().replace("-\n", "-").split())
    for group in groups_of(config):
        for name, stated in options(group).items():
            shown = ("loop" if loop else "trainer") in stated.scripts
            assert (f"--{name} " in text) == shown, name
            assert not shown or all(f"--{other} " in text for other in (*stated.also, *stated.opposite))
            assert not shown or all(str(choice) in text for choice in stated.choices)
            assert not shown or "".join(stated.help.split()) in text.replace(" ", ""), name


@pytest.mark.parametrize("loop", [True, False])
def test_a_recipe_of_flags_is_the_recipe_of_its_tree(loop):
    flags = (
        "--do_train --output_dir o --lr_scheduler cosine --no_random_crop --where width>5 --use_ema --report_to none"
    )
    recipe = read_recipe(flags.split(), loop)
    assert make_recipe(tree_of(recipe), not loop, LdmConfig) == recipe
    assert tree_of(recipe)["data"]["where"] == "width>5" and recipe.family == "ldm"


def test_the_trainer_wants_do_train():
    with pytest.raises(ConfigError, match="--do_train"):
        parse_arguments(["--output_dir", "x"], loop=False)


def test_autoencoder_flags():
    vae, data, training = parse_arguments(["--kl_weight", "0.1"], loop=True, config=AutoencoderConfig)
    assert vae.kl_weight == 0.1 and vae.reconstruction_loss == "l1"
    with pytest.raises(ConfigError, match="unknown flag --noise_offset"):
        parse_arguments(["--noise_offset", "0.1"], loop=True, config=AutoencoderConfig)


def test_loader_processes_above_the_cores_are_told_where_they_were_asked_for(capsys, monkeypatch):
    for module in ("config.training", "training.commands.train"):
        monkeypatch.setattr(f"ppldm.{module}.count_usable_cores", lambda: 2)
    for flags, is_told in (([], False), (["--num_workers", "2"], False), (["--num_workers", "3"], True)):
        parse_arguments(flags, loop=True)
        assert (" is above the 2 cores of this machine" in capsys.readouterr().err) == is_told
    parse_arguments(["--num_workers", "128"], loop=True)
    with pytest.raises(ConfigError, match="this machine has 2 cores; give as many, and at most 128"):
        parse_arguments(["--num_workers", "129"], loop=True)


def test_the_autoencoder_has_defaults_of_its_own():
    training = parse_arguments([], loop=True, config=AutoencoderConfig)[2]
    batch = training.per_device_train_batch_size * training.gradient_accumulation_steps
    assert (batch, training.learning_rate, training.output_dir) == (4, 1e-4, "./output-autoencoder")
    assert parse_arguments([], loop=True)[2].gradient_accumulation_steps == 10


def test_the_whole_recipe_is_shown_once_with_origins_and_can_be_given_back(capsys, monkeypatch, tmp_path):
    def shown(*words) -> str:
        with pytest.raises(SystemExit) as ended:
            read_recipe([*words, "--print_config"], loop=True)
        assert ended.value.code == 0
        return capsys.readouterr().out

    text = shown("--preset", "ldm-tiny-cpu", "--seed", "11", "data.caption_drop=0.25")
    assert re.search(r"^  seed: 11 +# flag$", text, re.M) and re.search(r"caption_drop: 0.25 +# override$", text, re.M)
    assert re.search(r"^  crop_fraction: 1.0 +# preset ldm-tiny-cpu$", text, re.M) and re.search(
        "# default$", text, re.M
    )
    (tmp_path / "recipe.yaml").write_text(text)
    given = ["--config", str(tmp_path / "recipe.yaml")]
    assert read_recipe(given, loop=True) == read_recipe(
        ["--preset", "ldm-tiny-cpu", "--seed", "11", "data.caption_drop=0.25"], loop=True
    )
    monkeypatch.setenv("PADDLE_TRAINERS_NUM", "2")
    monkeypatch.setenv("PADDLE_TRAINER_ID", "1")
    assert shown("--preset", "ldm-tiny-cpu") == ""

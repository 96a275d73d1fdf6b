"""`ppldm lora …`, and drawing with LoRA: a chain of commands over one small model."""

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from small_loras import differences as lora_differences
from small_loras import small_lora
from small_weights import differences, small_weights
from werkzeug import serving

import ppldm
from ppldm.cli.main import run
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.lora import merge
from ppldm.weights.lora.files import Lora, read_lora, write_lora
from ppldm.weights.lora.merge import merge_lora
from ppldm.weights.source import open_model
from ppldm.weights.write import write_weights


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    weights = small_weights(unet={"sample_size": 2})
    vocab = build_vocab(["a red heart"])
    weights.tokenizer = CaptionTokenizer([*vocab, *(f"x{number}" for number in range(60 - len(vocab)))], 77)
    write_weights(weights, "ppdiffusers", folder / "base")
    return folder / "base"


@pytest.fixture(scope="module")
def lora(base):
    """A file for its UNet."""
    pairs = small_lora({"unet": open_model(base).read().components["unet"]}, alpha=1.0)
    return write_lora(Lora(pairs.components, {"steps": 7}), base.parent / "lora.safetensors", "kohya")


def test_a_merged_model_and_what_is_extracted_of_it(base, lora, tmp_path, capsys):
    run(["lora", "merge", str(base), "--lora", f"{lora}:0.5", "--out", str(tmp_path / "merged")])
    merged, expected = open_model(tmp_path / "merged").read(), merge_lora(open_model(base).read(), read_lora(lora), 0.5)
    assert differences(merged, expected) == [] and merged.metadata["lora"] == [f"{lora}:0.5"]
    flags = ["--base", str(base), "--tuned", str(tmp_path / "merged"), "--rank", "2", "--to", "kohya"]
    run(["lora", "extract", *flags, "--out", str(tmp_path / "found.safetensors"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["components"]["unet"]["share"] > 0.9999 and report["components"]["text_encoder"]["layers"] == 0
    again = merge_lora(open_model(base).read(), read_lora(tmp_path / "found.safetensors"))
    for name, array in expected.components["unet"].arrays.items():
        np.testing.assert_allclose(again.components["unet"].arrays[name], array, atol=1e-5)
    run(["lora", "extract", *flags, "--out", str(tmp_path), "--rank", "1"])
    assert "layers hold" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--rank 0"):
        run(["lora", "extract", *flags, "--out", str(tmp_path), "--rank", "0"])


def test_what_kohyas_form_has_no_name_for_is_refused_before_the_work(base, tmp_path, monkeypatch):
    tuned = open_model(base).read()
    changed = small_lora({"text_encoder": tuned.components["text_encoder"]}, of="fc1")
    write_weights(merge_lora(tuned, changed), "ppdiffusers", tmp_path / "tuned")
    monkeypatch.setattr(merge, "extract_lora", None)  # must not be reached
    flags = ["--base", str(base), "--tuned", str(tmp_path / "tuned"), "--out", str(tmp_path / "found.safetensors")]
    with pytest.raises(ModelError, match="kohya's files know no layer .*fc1 of a text encoder that is not CLIP's"):
        run(["lora", "extract", *flags, "--to", "kohya"])
    with pytest.raises(TypeError):
        run(["lora", "extract", *flags, "--to", "diffusers"])


def test_convert_and_show(lora, tmp_path, capsys):
    run(["lora", "convert", str(lora), "--to", "diffusers", "--out", str(tmp_path)])
    run(["lora", "convert", str(tmp_path), "--out", str(tmp_path / "half.safetensors"), "--dtype", "float16"])
    capsys.readouterr()
    reports = []
    for file in (lora, tmp_path, tmp_path / "half.safetensors"):
        run(["lora", "show", str(file), "--json"])
        reports.append(json.loads(capsys.readouterr().out)["components"]["unet"])
    pairs = read_lora(lora).components["unet"].values()
    expected = np.sqrt(sum(np.sum(np.square(pair.change)) for pair in pairs))
    assert [report["norm"] for report in reports] == pytest.approx([expected] * 3, rel=1e-3)
    assert [report["alphas"] for report in reports] == [[1.0], [2.0], [2.0]]
    assert [report["dtypes"] for report in reports] == [["float32"], ["float32"], ["float16"]]
    run(["lora", "show", str(lora)])
    text = capsys.readouterr().out
    assert f"{len(pairs)} layers" in text and "rank 2, alpha 1; norm of the change" in text and "steps: 7" in text
    assert lora_differences(read_lora(tmp_path), read_lora(lora)) != []  # alpha is in the pairs


def test_pictures_of_a_lora_are_those_of_the_merged_model(base, lora, tmp_path):
    flags = ["--prompt", "a red heart", "--num-samples", "1", "--num-inference-steps", "2", "--guidance-scale", "1"]
    again = ["--lora", f"{lora}:0.75", "--lora", f"{lora}:-0.25"]
    drawn = {}
    words = {"plain": [], "one": ["--lora", f"{lora}:0.5"], "two": again, "none": ["--lora", f"{lora}:0"]}
    for out, own in words.items():
        run(["generate", "--model", str(base), "--out", str(tmp_path / out), *flags, *own])
        drawn[out] = np.asarray(Image.open(tmp_path / out / "000-00.png"), "i4")
    assert np.abs(drawn["one"] - drawn["two"]).max() <= 1 and (drawn["plain"] == drawn["none"]).all()
    assert np.abs(drawn["one"] - drawn["plain"]).max() > 1
    records = [json.loads((tmp_path / one / "pictures.jsonl").read_text()) for one in ("plain", "two")]
    assert "lora" not in records[0] and records[1]["lora"] == again[1::2]
    assert records[0]["weights"] != records[1]["weights"]
    merged = ppldm.load(base, lora=[f"{lora}:0.5"]).generate("a red heart", num_inference_steps=2, guidance_scale=1)
    assert (merged[0, 0] == drawn["one"]).all()


def test_the_page_draws_with_a_lora(base, lora, monkeypatch, tmp_path):
    few = {"num_inference_steps": 2, "num_samples": 1, "seed": 5, "guidance_scale": 1}

    def be_asked(page):
        client = page.test_client()
        assert client.get("/v1/models").json["models"][0]["lora"] == [f"{lora}:0.5"]
        job = client.post("/v1/pictures", json={"prompt": "a red heart", **few}).json
        while not list(tmp_path.glob(f"{job['id']}*.png")):
            time.sleep(0.01)

    monkeypatch.setattr(serving, "make_server", lambda host, port, page, **_: SimpleNamespace(
        port=1, serve_forever=lambda: be_asked(page), shutdown=lambda: None))  # fmt: skip
    run(["app", "--model", str(base), "--lora", f"{lora}:0.5", "--out", str(tmp_path)])
    drawn = np.asarray(Image.open(next(tmp_path.glob("*.png"))))
    assert (drawn == ppldm.load(base, lora=[f"{lora}:0.5"]).generate("a red heart", **few)[0, 0]).all()
    assert not (drawn == ppldm.load(base).generate("a red heart", **few)[0, 0]).all()
    with pytest.raises(ConfigError, match="there is no nowhere"):
        run(["app", "--model", str(base), "--lora", "nowhere"])


def test_what_does_not_fit_is_one_line(base, lora, tmp_path):
    with pytest.raises(ConfigError, match="--lora nowhere:2: there is no nowhere"):
        run(["generate", "--model", str(base), "--prompt", "x", "--lora", "nowhere:2"])
    other = small_lora({"unet": small_weights(unet={"cross_attention_dim": 48}).components["unet"]})
    file = write_lora(other, tmp_path)
    with pytest.raises(ModelError, match=r"attn2\.to_k as a weight of \[32, 48\], and it is \[32, 32\]"):
        ppldm.load(base, lora=[str(file)])

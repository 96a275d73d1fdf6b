"""Which metrics are computed, of what; features are computed once; what is not finite is an error."""

import dataclasses
import json

import numpy as np
import paddle
import pytest
from small_lpips import write_lpips

from ppldm.cli.main import run
from ppldm.demo.shapes_world.draw import draw_picture
from ppldm.demo.shapes_world.grammar import draw_scene, make_caption
from ppldm.evaluation import measure
from ppldm.evaluation.features.base import load_features
from ppldm.evaluation.measure import KNOWN, Networks, begin_result, check, choose_metrics
from ppldm.evaluation.metrics.distributions import frechet_distance
from ppldm.evaluation.pictures import open_pictures
from ppldm.utils.errors import DataError
from ppldm.utils.pictures import save_png
from ppldm.weights.losses import load_lpips

NONE = {"inception": None, "clip": None, "dinov2": None}


class Network:
    """Of `name`: means of colours; as a CLIP, texts are their lengths."""

    dim, digest, convention, logit_scale = 3, "d", "c", 10.0
    calls = 0

    def __call__(self, pictures):
        Network.calls += 1
        return np.stack([picture.mean((0, 1)) for picture in pictures]).astype(np.float32)

    def embed_texts(self, texts):
        return np.array([[len(text), 1, 0] for text in texts], np.float32)


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "load_features", lambda *_: Network())
    rng = np.random.default_rng(1)
    (tmp_path / "a").mkdir()
    for number in range(8):
        save_png(tmp_path / "a" / f"{number}.png", rng.integers(0, 256, (16, 16, 3), dtype=np.uint8))
        (tmp_path / "a" / f"{number}.txt").write_text("x" * (number + 1))
    return open_pictures(tmp_path / "a")


def test_by_default_all_that_is_at_hand_and_pairs_only_of_pairs():
    names = [one.name for one in choose_metrics([], NONE)[0]]
    assert {"frechet", "swd", "diversity", "composition"} <= set(names)
    assert set(names).isdisjoint({"fid", "clip_score", "psnr"})
    assert "fid" in [one.name for one in choose_metrics([], {**NONE, "inception": "f"})[0]]
    assert "psnr" in [one.name for one in choose_metrics([], NONE, paired=True)[0]]
    for given in (NONE, {**NONE, "clip": "x"}):
        wanted, left_out = choose_metrics([], given)
        assert {one.name for one in wanted} | left_out.keys() == KNOWN.keys() - {"psnr", "ssim", "lpips"}
    (one,) = choose_metrics(["fid:pixels"], NONE)[0]
    assert (one.name, one.features, one.asked) == ("fid:pixels", "pixels", True)


def test_clip_score_pairs_each_picture_with_its_caption(pictures, tmp_path):
    wanted, _ = choose_metrics(["clip_score"], {"clip": "x"})
    result = begin_result("a", pictures, pictures, None)
    measure.measure(result, wanted, pictures, pictures, Networks({}, None, None, True, tmp_path / "c"))
    colours = np.stack([picture.mean((0, 1)) for picture in pictures])
    texts = np.array([[n + 1, 1, 0] for n in range(8)])
    cosines = (colours * texts).sum(1) / np.linalg.norm(colours, axis=1) / np.linalg.norm(texts, axis=1)
    assert result.metrics["clip_score"]["value"] == pytest.approx(100 * cosines.mean(), rel=1e-6)
    assert result.metrics["clip_score"]["details"]["logit_scale"] == 10.0
    no_captions = dataclasses.replace(pictures, captions=[None, *pictures.captions[1:]])
    assert check(wanted[0], no_captions, pictures).startswith("needs captions, and 1 of 8 pictures have none")


def test_features_are_kept_by_all_that_they_depend_on(pictures, tmp_path, monkeypatch):
    def embed():
        before = Network.calls
        Networks({}, None, None, True, tmp_path / "c").embed("pixels", pictures, keep=True)
        return Network.calls - before

    assert (embed(), embed()) == (1, 0)
    for name in ("digest", "convention"):
        monkeypatch.setattr(Network, name, "other")
        assert (embed(), embed()) == (1, 0)
    pictures = dataclasses.replace(pictures, digest="other")
    assert (embed(), embed()) == (1, 0)
    monkeypatch.setattr(Network, "__call__", lambda _, found: np.full((len(found), 3), np.nan, np.float32))
    pictures = dataclasses.replace(pictures, digest="third")
    with pytest.raises(DataError, match="features of 8 of 8 pictures of .*a are not finite, 0.png for one"):
        embed()
    assert len(list((tmp_path / "c").iterdir())) == 4


def test_a_result_of_another_network_is_computed_again(pictures, tmp_path, monkeypatch):
    command = ["evaluate", str(tmp_path / "a"), "--against", str(tmp_path / "a"), "--metrics", "frechet", "--out",
               str(tmp_path / "o")]  # fmt: skip
    for digest in ("d", "other", "other"):
        before = Network.calls
        monkeypatch.setattr(Network, "digest", digest)
        run(command)
        settings = json.loads((tmp_path / "o" / "pictures.json").read_text())["settings"]
        assert settings["features.pixels"]["digest"] == digest
    assert Network.calls == before


def test_sizes_numbers_and_pairs_are_checked(pictures):
    def why(word, generated=pictures, real=pictures):
        (one,), _ = choose_metrics([word], {"inception": "x"})
        return check(one, generated, real)

    small = dataclasses.replace(pictures, ids=pictures.ids[:4], captions=pictures.captions[:4])
    other = dataclasses.replace(pictures, facts=pictures.facts | {"size": "8x8"})
    mixed = dataclasses.replace(pictures, facts=pictures.facts | {"size": "mixed"})
    assert [why(word) for word in ("swd", "psnr", "frechet", "precision")] == [""] * 4
    assert why("precision", small) == "needs 5 generated pictures, and there are 4; raise --num-samples"
    assert why("precision", pictures, small) == "needs 5 real pictures, and there are 4; raise --num-real"
    assert why("psnr", small) == "compares pictures pair by pair, and there are 4 and 8"
    assert why("swd", pictures, other) == "needs pictures of one size, and they are 16x16 and 8x8; give --resolution"
    assert "mixed" in why("swd", mixed, mixed) and why("frechet", pictures, other) == ""
    assert why("composition") == "needs captions of the shapes world"


def test_an_autoencoder_by_what_it_makes_of_the_real_pictures(tiny, tmp_path, capsys):
    weights = write_lpips(tmp_path)
    command = ["evaluate", tiny.vae, "--against", tiny.file_list, "--num-real", "6", "--batch-size", "4",
               "--out", str(tmp_path / "o"), "--metrics", "psnr", "ssim", "lpips", "frechet", "fid",
               "--lpips", str(weights), "--inception", "random"]  # fmt: skip
    run(command)
    result = (tmp_path / "o" / "reconstructions.json").read_bytes()
    made = sorted((tmp_path / "o" / "reconstructions").iterdir())
    before = [path.read_bytes() for path in made]
    real = open_pictures(tiny.file_list, 32, 6)
    first, second = (np.stack(some) for some in (real, open_pictures(tmp_path / "o" / "reconstructions")))
    errors = np.mean((first.astype(float) - second) ** 2, axis=(1, 2, 3))
    inputs = [paddle.to_tensor(some.transpose(0, 3, 1, 2) / 127.5 - 1, "float32") for some in (first, second)]
    found = {name: one["value"] for name, one in json.loads(result)["metrics"].items()}
    assert found["psnr"] == pytest.approx(np.mean(10 * np.log10(255**2 / errors)))
    assert found["lpips"] == pytest.approx(float(load_lpips(weights)(*inputs).mean()), rel=1e-4)
    for name, network in (("frechet", load_features("pixels")), ("fid", load_features("inception", "random"))):
        expected = frechet_distance(network(second), network(first), seed=0).value  # of reconstructions: rFID
        assert found[name] == pytest.approx(expected, rel=1e-4) and expected > 0
    assert found.keys() == {"psnr", "ssim", "lpips", "frechet", "fid"}
    made[2].unlink()
    (tmp_path / "o" / "reconstructions.json").unlink()
    run(command)
    assert [path.read_bytes() for path in made] == before
    assert (tmp_path / "o" / "reconstructions.json").read_bytes() == result


def test_scenes_are_graded_by_their_captions(tmp_path):
    for folder in ("a", "shuffled"):
        (tmp_path / folder).mkdir()
    scenes = [draw_scene(np.random.default_rng(number), held_out=False, max_objects=1) for number in range(12)]
    for number, scene in enumerate(scenes):
        picture = draw_picture(scene, 48, np.random.default_rng(number))
        for folder, other in (("a", number), ("shuffled", (number + 5) % 12)):
            save_png(tmp_path / folder / f"{number:02d}.png", picture)
            (tmp_path / folder / f"{number:02d}.txt").write_text(make_caption(scenes[other], "en"))
    values = {}
    for folder in ("a", "shuffled"):
        out = tmp_path / f"out-{folder}"
        for _ in range(2):
            run(["evaluate", str(tmp_path / folder), "--against", str(tmp_path / "a"), "--metrics", "composition",
                 "--out", str(out)])  # fmt: skip
        values[folder] = json.loads((out / "pictures.json").read_text())["metrics"]
    assert all(found["value"] == 1.0 for found in values["a"].values())
    one = values["shuffled"]["composition.seen.single.everything"]
    assert one["value"] < 0.5 and one["details"]["pictures"] == 12

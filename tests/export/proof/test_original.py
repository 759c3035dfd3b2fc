"""Imported models against the original: what the certificate says, what `verify --against` finds, and each miss."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import fatdeploy
from fatdeploy.certificate import read_certificate
from fatdeploy.cli import main
from fatdeploy.errors import CheckpointError, ParityFailed
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import exportable_model
from fatdeploy.export.models.loading import Lengths, imported_model
from fatdeploy.export.proof import original
from fatdeploy.export.proof.draw_probes import drawn_probes
from fatdeploy.runtimes.defaults import options_from_record
from tests.support.hugging_face_folders import write_folder

SETTINGS = {"num_beams": 3, "max_length": 20, "no_repeat_ngram_size": 3, "length_penalty": 0.8, "early_stopping": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "marian"
    write_folder("marian", 3, path)
    change_settings(path, **SETTINGS)
    return path


@pytest.fixture(scope="module")
def bundle(folder: Path) -> Path:
    fatdeploy.export_model(str(folder), folder.parent / "bundle")
    return folder.parent / "bundle"


def change_settings(folder: Path, **settings: object) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def copied(folder: Path, path: Path) -> Path:
    return Path(shutil.copytree(folder, path))


def test_the_certificate_says_what_the_original_gave(bundle: Path) -> None:
    record = read_certificate(fatdeploy.bundle.read_bundle(bundle)).original
    assert record is not None
    assert record.compared == f"transformers {original.importlib.metadata.version('transformers')}"
    assert record.agreement is not None
    results = [(result.settings, result.num_beams, result.targets) for result in record.agreement.generated]
    assert results == [("the folder's settings", 3, 13), ("greedy search", 1, 13)]
    assert record.agreement.dtype == "float64"
    assert 0 < record.agreement.largest_relative_difference < 1e-6
    assert "13 of 13 targets with greedy search" in record.line()


def test_the_bundle_decodes_with_the_folders_settings(bundle: Path) -> None:
    with fatdeploy.load(bundle) as model:
        assert (model.options.num_beams, model.options.max_new_tokens, model.options.length_penalty) == (3, 19, 0.8)


def test_verify_repeats_the_comparison_later(bundle: Path, folder: Path) -> None:
    result = CliRunner().invoke(main, ["verify", str(bundle), "--against", str(folder), "--n", "4"])
    assert result.exit_code == 0, result.output
    assert "against the original: transformers 5" in result.output
    record = fatdeploy.verify(bundle, against=str(folder)).as_dict()["original"]
    assert record["agreement"]["generated"][1]["targets"] == 13


def test_other_weights_in_the_original_are_a_miss(bundle: Path, folder: Path, tmp_path: Path) -> None:
    other = copied(folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.decoder.layers.0.fc2.bias"][0] += 1.0
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ParityFailed, match="row 0, step 0"):
        fatdeploy.verify(bundle, against=str(other))


def test_a_bundle_that_decodes_with_other_settings_than_the_original_is_a_miss(
    bundle: Path, folder: Path, tmp_path: Path
) -> None:
    other = copied(folder, tmp_path / "other")
    change_settings(other, repetition_penalty=3.0)
    with pytest.raises(ParityFailed, match=r"source \d, the folder's settings, position \d+: transformers 5\S+ says"):
        fatdeploy.verify(bundle, against=str(other))


def test_an_import_with_wrong_weights_is_a_miss(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = original.opened_original

    def tampered(path: Path) -> original.Original:
        opened = honest(path)
        with torch.no_grad():
            opened.model.final_logits_bias[0, 7] += 1e-3
        return opened

    monkeypatch.setattr(original, "opened_original", tampered)
    with pytest.raises(ParityFailed, match=r"probe 0: the logits of the imported model differ .* more than 1e-06"):
        fatdeploy.export_model(str(folder), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_folder_that_only_fatdeploy_reads_is_refused(folder: Path, tmp_path: Path) -> None:
    other = copied(folder, tmp_path / "other")
    (other / "model.safetensors").rename(other / "model-1.safetensors")
    listed = dict.fromkeys(load_file(other / "model-1.safetensors"), "model-1.safetensors")
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    with pytest.raises(CheckpointError, match=r"transformers 5\S+ cannot read .*other, .* \(KeyError: 'metadata'\)"):
        fatdeploy.export_model(str(other), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_settings_that_give_another_target_are_a_miss(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = original.opened_original

    def tampered(path: Path) -> original.Original:
        opened = honest(path)
        opened.model.generation_config.repetition_penalty = 3.0
        return opened

    monkeypatch.setattr(original, "opened_original", tampered)
    with pytest.raises(ParityFailed, match=r"source \d, the folder's settings, position \d+: transformers 5\S+ says"):
        fatdeploy.export_model(str(folder), tmp_path / "bundle")


def test_ids_that_a_folder_leaves_to_its_family_are_compared_too(tmp_path: Path) -> None:
    write_folder("bart", 3, tmp_path / "folder")
    (tmp_path / "folder" / "generation_config.json").unlink()
    path = tmp_path / "folder" / "config.json"
    config = json.loads(path.read_text())
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    path.write_text(json.dumps({name: value for name, value in config.items() if name not in ids}))
    bundle = fatdeploy.export_model(str(tmp_path / "folder"), tmp_path / "bundle")
    assert (bundle.spec.pad_id, bundle.spec.bos_id, bundle.spec.eos_id) == (1, 2, 2)
    record = read_certificate(bundle).original
    assert record is not None
    assert record.agreement is not None
    assert [result.targets for result in record.agreement.generated] == [13, 13]


def test_samples_are_not_compared(folder: Path, tmp_path: Path) -> None:
    other = copied(folder, tmp_path / "other")
    change_settings(other, do_sample=True, temperature=0.7, num_beams=1, early_stopping=False, length_penalty=1.0)
    fatdeploy.export_model(str(other), tmp_path / "bundle")
    record = read_certificate(fatdeploy.bundle.read_bundle(tmp_path / "bundle")).original
    assert record is not None
    assert record.agreement is not None
    assert [result.settings for result in record.agreement.generated] == ["greedy search"]


@pytest.mark.parametrize(
    ("settings", "unshared"),
    [
        ({"num_return_sequences": 3}, "num_return_sequences"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "num_beam_groups, diversity_penalty"),
        ({"max_time": 1e-3}, "max_time"),
        ({"stop_strings": ["x"]}, "stop_strings"),
        ({"forced_decoder_ids": [[1, 13]]}, "forced_decoder_ids"),
        ({"guidance_scale": 2.0, "token_healing": True}, "guidance_scale, token_healing"),
        ({"penalty_alpha": 0.6, "prompt_lookup_num_tokens": 3}, "penalty_alpha, prompt_lookup_num_tokens"),
        ({"watermarking_config": {"bias": 2.0}, "force_words_ids": [[13]]}, "watermarking_config, force_words_ids"),
        ({"encoder_repetition_penalty": 1.7, "encoder_no_repeat_ngram_size": 1, "num_beams": 1}, ""),
        ({"min_length": 200, "max_length": 300}, ""),
        ({"cache_implementation": "static", "guidance_scale": 1}, ""),
    ],
    ids=str,
)
def test_settings_that_only_one_side_has_are_left_out_and_named(
    settings: dict[str, object], unshared: str, folder: Path, tmp_path: Path
) -> None:
    other = copied(folder, tmp_path / "other")
    change_settings(other, **settings)
    model, origin = imported_model(other, None, Lengths())
    exportable = exportable_model(model)
    assert origin.generation is not None
    options = options_from_record(origin.generation, exportable.spec)
    engine = EagerEngine(exportable)
    record = original.original_record(other, exportable, engine, drawn_probes(engine), options)
    assert record.agreement is not None
    by_settings = record.agreement.generated[0]
    assert by_settings.settings == "the folder's settings" + (f" but for {unshared}" if unshared else "")
    assert (by_settings.targets, by_settings.ties) == (13, 0)


def test_settings_that_the_package_refuses_are_an_error_in_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = original.opened_original

    def tampered(path: Path) -> original.Original:
        opened = honest(path)
        opened.model.generation_config.num_beams = "three"
        return opened

    monkeypatch.setattr(original, "opened_original", tampered)
    with pytest.raises(
        ParityFailed, match=r"^transformers 5\S+ cannot generate with the folder's settings: TypeError: .+$"
    ):
        fatdeploy.export_model(str(folder), tmp_path / "bundle")


def test_without_the_package_the_certificate_says_so(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(original, "is_installed", lambda: False)
    fatdeploy.export_model(str(folder), tmp_path / "bundle")
    record = read_certificate(fatdeploy.bundle.read_bundle(tmp_path / "bundle")).original
    assert record is not None
    assert record.agreement is None
    assert record.line() == (
        "compared with nothing: transformers is not installed, so fatdeploy's own reading of the folder counts"
    )


# Sources as long as T5 takes them are too long to ask ``generate`` about.
@pytest.mark.parametrize(("family", "targets"), [("t5", 10), ("encoder-decoder", 13)])
def test_families_with_norms_of_their_own_agree_in_double_precision(family: str, targets: int, tmp_path: Path) -> None:
    write_folder(family, 3, tmp_path / "folder")
    fatdeploy.export_model(str(tmp_path / "folder"), tmp_path / "bundle")
    record = read_certificate(fatdeploy.bundle.read_bundle(tmp_path / "bundle")).original
    assert record is not None
    assert record.agreement is not None
    assert (record.agreement.dtype, record.agreement.generated[-1].targets) == ("float64", targets)

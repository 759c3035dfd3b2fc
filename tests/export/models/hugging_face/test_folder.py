"""Forms of a folder: shards, pickles, half precision, early versions, lengths; and folders that are refused."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fatdeploy.errors import CheckpointError, ConfigError
from fatdeploy.export.models.hugging_face.folder import is_hugging_face_folder, model_from_folder
from fatdeploy.export.models.loading import model_from_source
from fatdeploy.export.proof.original import AllInDouble
from fatdeploy.export.reference.model import ReferenceModel
from tests.support.hugging_face_folders import WrittenFolder, write_folder

Tensors = dict[str, Tensor]


def change_config(folder: Path, **values: Any) -> None:
    """Set keys of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def change_weights(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def as_pickle(folder: Path, *, zipped: bool = True) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)


def example(model: ReferenceModel) -> tuple[Tensor, Tensor, Tensor]:
    draw = np.random.default_rng(0)
    source, target = (torch.from_numpy(draw.integers(12, 20, shape)) for shape in ((2, 9), (2, 7)))
    mask = torch.ones_like(source, dtype=torch.bool)
    mask[1, 5:] = False
    return source, mask, target


def logits_of(folder: Path) -> Tensor:
    model = model_from_folder(folder)[0].double()
    with torch.inference_mode():
        logits: Tensor = model(*example(model))
    return logits


def check_like_transformers(folder: WrittenFolder) -> None:
    ours = model_from_folder(folder.path)[0].double()
    source, mask, target = example(ours)
    with torch.inference_mode(), AllInDouble():
        logits = folder.model()(input_ids=source, attention_mask=mask.long(), decoder_input_ids=target).logits
        difference = (ours(source, mask, target) - logits).abs().max()
    assert difference <= 1e-6 * logits.abs().max()


@pytest.fixture
def bart(tmp_path: Path) -> Path:
    """Return a folder with one encoder layer, two decoder layers and tied matrices."""
    return drawn(tmp_path, "bart", lambda config: stacks(config) == (1, 2, True))


def drawn(path: Path, family: str, fits: Callable[[dict[str, Any]], bool]) -> Path:
    """Return the first drawn folder of a family whose configuration fits."""
    for seed in range(200):
        write_folder(family, seed, path)
        if fits(json.loads((path / "config.json").read_text())):
            return path
    raise AssertionError("no drawn folder fits")


def stacks(config: dict[str, Any]) -> tuple[int, int, bool]:
    return config["encoder_layers"], config["decoder_layers"], config["tie_word_embeddings"]


# Forms of the same weights


@pytest.mark.parametrize("form", ["shards", "pickle", "pickled shards", "early pickle"])
def test_every_form_of_a_file_gives_the_same_model(bart: Path, form: str) -> None:
    expected = logits_of(bart)
    if form in ("shards", "pickled shards"):
        split(bart, pickled=form == "pickled shards")
    else:
        as_pickle(bart, zipped=form == "pickle")
    assert not (bart / "model.safetensors").exists()
    assert torch.equal(logits_of(bart), expected)


def split(folder: Path, *, pickled: bool = False) -> list[str]:
    """Store the weights in two shards with an index; return their names."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    files = [f"{stem}-0000{part}-of-00002.{suffix}" for part in (1, 2)]
    listed = {name: files[index % 2] for index, name in enumerate(tensors)}
    for file in files:
        part = {name: tensors[name] for name in tensors if listed[name] == file}
        if pickled:
            torch.save(part, folder / file)
        else:
            save_file(part, folder / file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": listed}))
    return files


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_become_float32(bart: Path, dtype: torch.dtype) -> None:
    change_weights(bart, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))
    model, _ = model_from_folder(bart)
    stored = load_file(bart / "model.safetensors")["model.shared.weight"].float()
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    assert torch.equal(model.output.weight, stored)


def test_a_file_of_the_model_without_its_head_has_names_without_a_prefix(bart: Path) -> None:
    expected = logits_of(bart)
    change_weights(bart, lambda tensors: rename(tensors, lambda name: name.removeprefix("model.")))
    assert torch.equal(logits_of(bart), expected)


def rename(tensors: Tensors, new: Callable[[str], str]) -> None:
    for name in list(tensors):
        tensors[new(name)] = tensors.pop(name)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.encoder.embed_tokens.weight"])
def test_tied_matrices_are_found_under_any_of_their_names(bart: Path, name: str) -> None:
    expected = logits_of(bart)
    change_weights(bart, lambda tensors: tensors.update({name: tensors.pop("model.shared.weight")}))
    assert torch.equal(logits_of(bart), expected)
    assert model_from_folder(bart)[0].config.tie_embeddings


def test_matrices_that_differ_are_not_tied_whatever_the_configuration_says(bart: Path) -> None:
    change_weights(bart, lambda tensors: tensors.update({"lm_head.weight": tensors["model.shared.weight"].roll(1, 0)}))
    config = model_from_folder(bart)[0].config
    assert (config.tie_embeddings, config.tie_output) == (True, "no")


def test_equal_matrices_under_several_names_are_stored_once(bart: Path) -> None:
    names = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    change_weights(bart, lambda t: t.update({name: t["model.shared.weight"].clone() for name in names}))
    model, _ = model_from_folder(bart)
    assert model.output is model.target_embedding is model.source_embedding


def test_a_bias_of_zeros_and_a_missing_one_are_left_out(bart: Path) -> None:
    assert model_from_folder(bart)[0].config.output_bias
    change_weights(bart, lambda tensors: tensors["final_logits_bias"].zero_())
    expected = logits_of(bart)
    assert not model_from_folder(bart)[0].config.output_bias
    change_weights(bart, lambda tensors: tensors.pop("final_logits_bias"))
    assert torch.equal(logits_of(bart), expected)


def test_missing_key_biases_are_zeros_and_change_nothing(bart: Path) -> None:
    expected = logits_of(bart)
    change_weights(bart, lambda t: [t.pop(name) for name in list(t) if name.endswith("k_proj.bias")])
    torch.testing.assert_close(logits_of(bart), expected, rtol=1e-9, atol=1e-9)


# What early versions wrote


def test_a_t5_of_version_1_1_has_its_own_head_and_says_by_its_ties_that_it_does_not_scale(tmp_path: Path) -> None:
    folder = write_folder("t5", 0, tmp_path)
    head = torch.randn(load_file(tmp_path / "model.safetensors")["shared.weight"].shape, generator=seeded())
    change_weights(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))
    for tied in (False, True):
        change_config(tmp_path, scale_decoder_outputs=None, tie_word_embeddings=tied)
        model, _ = model_from_folder(tmp_path)
        stored = load_file(tmp_path / "model.safetensors")["decoder.final_layer_norm.weight"]
        assert torch.equal(model.output.weight, head)
        torch.testing.assert_close(model.decoder.norm.weight, stored * 24**-0.5 if tied else stored)
        check_like_transformers(folder)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("family", ["t5", "mt5", "umt5"])
@pytest.mark.parametrize("scaled", [None, True, False])
@pytest.mark.parametrize("tied", [None, True, False])
def test_outputs_are_scaled_where_transformers_scales_them(
    family: str, scaled: bool | None, tied: bool | None, tmp_path: Path
) -> None:
    folder = write_folder(family, 1, tmp_path)
    change_config(tmp_path, scale_decoder_outputs=scaled, tie_word_embeddings=tied)
    check_like_transformers(folder)


def test_a_stored_table_of_sinusoids_is_used_and_limits_the_lengths(tmp_path: Path) -> None:
    folder = write_folder("marian", 0, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    table = torch.randn(config["max_position_embeddings"], 24, generator=seeded())
    names = [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")]
    change_weights(tmp_path, lambda tensors: tensors.update({name: table + index for index, name in enumerate(names)}))
    check_like_transformers(folder)
    with pytest.raises(ConfigError, match=r"max_source must lie in 1…\d+, the positions that the model has, found 999"):
        model_from_folder(tmp_path, max_source=999)


# Lengths and ids


def test_lengths_can_be_lowered_and_the_model_stays_the_same(bart: Path) -> None:
    expected = logits_of(bart)
    model, _ = model_from_folder(bart, max_source=9, max_target=7)
    assert (model.spec.max_source, model.spec.max_target) == (9, 7)
    assert torch.equal(model.double()(*example(model)), expected)


@pytest.mark.parametrize("family", ["m2m_100", "t5", "pegasus"])
def test_lengths_can_be_raised_where_positions_come_from_a_formula(family: str, tmp_path: Path) -> None:
    write_folder(family, 0, tmp_path)
    model, _ = model_from_folder(tmp_path, max_source=700, max_target=600)
    assert (model.spec.max_source, model.spec.max_target) == (700, 600)
    torch.testing.assert_close(model.double()(*example(model)), logits_of(tmp_path), rtol=0, atol=1e-12)


def test_learned_positions_cannot_be_more_than_there_are(bart: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_target must lie in 1…\d+, the positions that the model has, found 99"):
        model_from_folder(bart, max_target=99)
    with pytest.raises(ConfigError, match="max_source must lie in 1"):
        model_from_folder(bart, max_source=0)


def test_a_t5_without_a_length_reads_512_tokens(tmp_path: Path) -> None:
    write_folder("t5", 0, tmp_path)
    assert model_from_folder(tmp_path)[0].spec.max_source == 512
    change_config(tmp_path, n_positions=64)
    assert model_from_folder(tmp_path)[0].spec.max_target == 64


def test_ids_come_from_the_generation_config_first(bart: Path) -> None:
    generation = {"eos_token_id": [9, 3], "decoder_start_token_id": 8, "pad_token_id": 7, "num_beams": 4}
    (bart / "generation_config.json").write_text(json.dumps(generation))
    model, folder = model_from_folder(bart)
    assert (model.spec.pad_id, model.spec.bos_id, model.spec.eos_id) == (7, 8, 9)
    assert (folder.path, folder.model_type, folder.generation) == (bart, "bart", generation)
    assert folder.config == json.loads((bart / "config.json").read_text())


def test_a_target_starts_with_bos_where_no_start_is_configured(bart: Path) -> None:
    (bart / "generation_config.json").unlink()
    change_config(bart, bos_token_id=6, eos_token_id=5, pad_token_id=4)
    config = json.loads((bart / "config.json").read_text()) | {"decoder_start_token_id": None}
    (bart / "config.json").write_text(json.dumps(config))
    model, folder = model_from_folder(bart)
    assert (model.spec.pad_id, model.spec.bos_id, model.spec.eos_id) == (4, 6, 5)
    assert folder.generation == {}


def test_a_folder_is_recognised_by_its_model_type(bart: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    assert is_hugging_face_folder(bart)
    assert not is_hugging_face_folder(other)
    (other / "config.json").write_text('{"vocab_size": 12}')
    assert not is_hugging_face_folder(other)
    (other / "config.json").write_text("{")
    assert not is_hugging_face_folder(other)


def test_a_folder_can_be_exported_by_its_path(bart: Path) -> None:
    model, origin = model_from_source(str(bart))
    assert isinstance(model, ReferenceModel)
    assert origin.name == bart.name


# Folders that are refused: one line, all reasons


def check_refused(folder: Path, *patterns: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        model_from_folder(folder)
    assert "\n" not in str(caught.value)
    for pattern in patterns:
        caught.match(pattern)


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    check_refused(tmp_path, r"has no config\.json: expected a folder that save_pretrained wrote")


@pytest.mark.parametrize(
    ("content", "pattern"),
    [("{", "is not JSON: .*is the file complete"), ("[1]", "is a JSON list, expected an object"), ("", "is not JSON")],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_that_is_no_object(bart: Path, name: str, content: str, pattern: str) -> None:
    (bart / name).write_text(content)
    check_refused(bart, rf"{name} {pattern}")


def test_an_unknown_type_lists_the_known_ones(bart: Path) -> None:
    change_config(bart, model_type="whisper")
    check_refused(
        bart,
        "model_type 'whisper' is not supported, only marian, bart, plbart, mbart, m2m_100, pegasus, blenderbot, "
        "blenderbot-small, t5, mt5, umt5, encoder-decoder",
        r"docs/your-own-model\.md",
    )


def test_a_folder_without_weights_says_what_it_has_instead(bart: Path) -> None:
    (bart / "model.safetensors").rename(bart / "tf_model.h5")
    check_refused(bart, r"has no weights: expected one of model\.safetensors, .*; tf_model\.h5 cannot be read")


@pytest.mark.parametrize("kept", [0.7, 0.001])
@pytest.mark.parametrize("form", ["whole", "pickle", "early pickle"])
def test_a_truncated_file(bart: Path, form: str, kept: float) -> None:
    if form != "whole":
        as_pickle(bart, zipped=form == "pickle")
    [path] = [*bart.glob("*.safetensors"), *bart.glob("*.bin")]
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    check_refused(bart, rf"cannot read the weights of .*{path.name}.*(is the file complete|is damaged)")


def test_truncated_shards_are_all_named(bart: Path) -> None:
    files = split(bart)
    for file in files:
        (bart / file).write_bytes((bart / file).read_bytes()[:-40])
    check_refused(bart, *files)


def test_a_shard_that_is_missing_and_one_outside_of_the_folder(bart: Path) -> None:
    files = split(bart)
    (bart / files[1]).unlink()
    check_refused(bart, rf"index\.json cannot be followed: {files[1]} is missing")
    index = bart / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    for name in ("../secret.safetensors", "/etc/x.safetensors", "a\\b.safetensors", "c:x.safetensors", "x.bin", 5):
        index.write_text(json.dumps({"weight_map": {**listed, "lm_head.weight": name}}))
        check_refused(bart, r"index\.json cannot be followed: .* is not the name of a \.safetensors file in the folder")


@pytest.mark.parametrize("content", [{}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_without_a_map(bart: Path, content: dict[str, Any]) -> None:
    (bart / "model.safetensors").rename(bart / "model.safetensors.index.json")
    (bart / "model.safetensors.index.json").write_text(json.dumps(content))
    check_refused(bart, "has no weight_map of tensors and their files")


def test_a_tensor_that_is_not_in_its_shard(bart: Path) -> None:
    file = split(bart)[0]
    tensors = load_file(bart / file)
    name = next(iter(tensors))
    del tensors[name]
    save_file(tensors, bart / file)
    check_refused(bart, f"{file} lacks {name}, which the index says it has")


class Payload:
    """Code in a pickle: it would leave a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.place,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_refused_and_nothing_is_executed(bart: Path, zipped: bool) -> None:
    (bart / "model.safetensors").unlink()
    content = {"model.shared.weight": torch.zeros(2), "payload": Payload(bart / "executed")}
    if zipped:
        torch.save(content, bart / "pytorch_model.bin")
    else:
        (bart / "pytorch_model.bin").write_bytes(pickle.dumps(content))
    check_refused(bart, r"pytorch_model\.bin is damaged, or has code in it, which was not executed")
    assert not (bart / "executed").exists()


def test_a_pickle_of_something_else_than_tensors(bart: Path) -> None:
    (bart / "model.safetensors").unlink()
    torch.save({"step": 3}, bart / "pytorch_model.bin")
    check_refused(bart, r"pytorch_model\.bin is not a dictionary of tensors")


def test_all_tensors_that_do_not_fit_are_one_error(bart: Path) -> None:
    def damage(tensors: Tensors) -> None:
        del tensors["model.encoder.layers.0.fc1.weight"]
        tensors["model.decoder.layers.1.fc2.bias"] = torch.zeros(5)
        tensors["model.decoder.layers.0.fc2.bias"] = tensors["model.decoder.layers.0.fc2.bias"].to(torch.int8)
        tensors["classification_head.dense.weight"] = torch.zeros(2, 2)

    change_weights(bart, damage)
    check_refused(
        bart,
        r"do not fit config\.json",
        r"missing model\.encoder\.layers\.0\.fc1\.weight",
        r"not understood classification_head\.dense\.weight",
        r"model\.decoder\.layers\.1\.fc2\.bias has shape \[5\], config\.json expects \[24\]",
        r"model\.decoder\.layers\.0\.fc2\.bias is I8, expected floating-point numbers",
    )


def test_a_configuration_with_more_or_fewer_layers_than_the_weights(bart: Path) -> None:
    change_config(bart, encoder_layers=3, decoder_layers=1, num_hidden_layers=None)
    check_refused(
        bart,
        r"missing model\.encoder\.layers\.1\.\*; missing model\.encoder\.layers\.2\.\*",
        r"not understood model\.decoder\.layers\.1\.\*",
    )


def test_numbers_that_are_none(bart: Path) -> None:
    def damage(tensors: Tensors) -> None:
        tensors["model.shared.weight"][3, 2] = torch.nan
        tensors["model.decoder.layers.0.fc1.bias"][1] = torch.inf

    change_weights(bart, damage)
    check_refused(
        bart, r"NaN or infinity in model\.shared\.weight", r"NaN or infinity in model\.decoder\.layers\.0\.fc1\.bias"
    )


def test_an_output_matrix_that_is_neither_stored_nor_tied(bart: Path) -> None:
    change_config(bart, tie_word_embeddings=False)
    check_refused(bart, r"missing lm_head\.weight")


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        ({"activation_function": "quick_gelu"}, "activation_function = 'quick_gelu' is not available, only relu, gelu"),
        ({"d_model": "24"}, "d_model must be a whole number of at least 1, found '24'"),
        ({"decoder_layers": 0}, "decoder_layers must be a whole number of at least 1, found 0"),
        ({"num_hidden_layers": 9}, "encoder_layers = 1 contradicts num_hidden_layers = 9"),
        ({"scale_embedding": "yes"}, "scale_embedding must be true or false, found 'yes'"),
        ({"activation_function": 5}, "activation_function must be a string, found 5"),
        ({"normalize_before": True}, "normalize_before only False is supported here, found True"),
        ({"add_final_layer_norm": True}, "add_final_layer_norm only False is supported here, found True"),
        ({"normalize_embedding": False}, "normalize_embedding only True is supported here, found False"),
        ({"static_position_embeddings": True}, "static_position_embeddings only False is supported here, found True"),
        ({"encoder_attention_heads": 5}, "width: 24 is not a multiple of heads = 5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported, use the model before"),
    ],
)
def test_a_key_that_cannot_be_used_is_named(bart: Path, values: dict[str, Any], pattern: str) -> None:
    change_config(bart, **values)
    check_refused(bart, rf"config\.json.*{pattern}")


def test_ids_that_are_none_are_refused(bart: Path) -> None:
    (bart / "generation_config.json").write_text('{"eos_token_id": [], "pad_token_id": -1}')
    check_refused(
        bart, r"pad_token_id must be a token's id, found -1", r"eos_token_id must be a token's id, found \[\]"
    )
    (bart / "generation_config.json").write_text('{"eos_token_id": 500}')
    check_refused(bart, r"eos_id: must be below vocab_size = \d+, found 500")


@pytest.mark.parametrize(
    ("values", "pattern"),
    [
        ({"feed_forward_proj": "tanh", "dense_act_fn": None}, "feed_forward_proj = 'tanh' is not available"),
        ({"dense_act_fn": "tanh"}, "dense_act_fn = 'tanh' is not available"),
        ({"relative_attention_num_buckets": 2}, "relative_attention_num_buckets must be a whole number of at least 4"),
        ({"relative_attention_max_distance": 3}, "relative_attention_max_distance must be more than half of"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon must be a positive number, found 0"),
    ],
)
def test_a_key_of_t5_that_cannot_be_used_is_named(values: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    write_folder("t5", 0, tmp_path)
    change_config(tmp_path, **values)
    check_refused(tmp_path, pattern)


def test_m2m_targets_cannot_start_with_padding(tmp_path: Path) -> None:
    write_folder("m2m_100", 0, tmp_path)
    shutil.copy(tmp_path / "config.json", tmp_path / "generation_config.json")
    pad = json.loads((tmp_path / "config.json").read_text())["pad_token_id"]
    (tmp_path / "generation_config.json").write_text(json.dumps({"decoder_start_token_id": pad}))
    check_refused(tmp_path, f"decoder_start_token_id must not be pad_token_id = {pad}")


@pytest.mark.parametrize(
    ("side", "values", "pattern"),
    [
        ("encoder", {"model_type": "roberta"}, "encoder.model_type only 'bert' is supported here, found 'roberta'"),
        ("decoder", {"model_type": "gpt2"}, "decoder.model_type only 'bert' is supported here, found 'gpt2'"),
        (
            "encoder",
            {"position_embedding_type": "relative_key"},
            "position_embedding_type only 'absolute' is supported",
        ),
        ("decoder", {"add_cross_attention": False}, "decoder.add_cross_attention must be true"),
        ("decoder", {"is_decoder": False}, "decoder.is_decoder must be true"),
        ("encoder", {"is_decoder": True}, "encoder.is_decoder only False is supported here"),
        ("decoder", {"hidden_size": 48}, "decoder.hidden_size must be the encoder's 24, found 48"),
        ("decoder", {"hidden_act": "tanh"}, "decoder.hidden_act must be the encoder's"),
        ("decoder", {"layer_norm_eps": 0.5}, "decoder.layer_norm_eps must be the encoder's"),
        ("encoder", {"pruned_heads": {"0": [1]}}, "encoder.pruned_heads only {} is supported here"),
    ],
)
def test_a_pair_of_berts_that_cannot_be_used(side: str, values: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    write_folder("encoder-decoder", 0, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    change_config(tmp_path, **{side: config[side] | values})
    check_refused(tmp_path, pattern)


def test_a_pair_needs_both_sides_of_its_own(tmp_path: Path) -> None:
    write_folder("encoder-decoder", 0, tmp_path)
    change_config(tmp_path, tie_encoder_decoder=True, decoder="bert")
    check_refused(
        tmp_path, "tie_encoder_decoder only False is supported here", "decoder must be an object, found 'bert'"
    )

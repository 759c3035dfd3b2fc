import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fatdeploy.bundle import digest_of, graph_hash, read_bundle, write_manifest
from fatdeploy.errors import BundleError
from fatdeploy.manifest import DECODER, ENCODER, FORMAT, MANIFEST, WEIGHTS, Manifest, Provenance
from fatdeploy.plans import PlanRecord, Profile, SizeRange, axes_of, inputs_of, outputs_of, plan_file, shapes_of
from fatdeploy.spec import ModelSpec, cache_specs, memory_specs

SPEC = ModelSpec(
    vocab_size=64,
    width=32,
    max_source=20,
    max_target=24,
    pad_id=0,
    bos_id=1,
    eos_id=2,
    memory=memory_specs(0, 4, 8),
    state=cache_specs(0, 4, 8),
)
PROFILE = Profile(
    sizes={
        "batch": SizeRange(least=1, usual=2, most=8),
        "rows": SizeRange(least=1, usual=4, most=32),
        "source": SizeRange(least=1, usual=10, most=20),
        "step": SizeRange(least=1, usual=1, most=3),
    }
)
PLAN = PlanRecord(
    part="decoder",
    file="engines/decoder.plan",
    flavour="tensorrt-rtx",
    version="1.7.1",
    compute_capabilities=("8.6", "12.0"),
    profiles=(PROFILE,),
    graph_sha256="0" * 64,
)
MANIFEST_OF_IT = Manifest(
    spec=SPEC,
    target="tensorrt-rtx",
    precision="fp32",
    dialect="standard",
    opset=24,
    versions={},
    source=Provenance("it", "0", None),
    plans=(PLAN,),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (ENCODER, DECODER, WEIGHTS, PLAN.file):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


@pytest.mark.parametrize("sizes", [(0, 1, 1), (2, 1, 3), (1, 4, 3), (-1, 0, 1)])
def test_a_range_goes_up_from_one(sizes: tuple[int, int, int]) -> None:
    least, usual, most = sizes
    with pytest.raises(ValueError, match=f"found {least}, {usual}, {most}"):
        SizeRange(least=least, usual=usual, most=most)


def test_a_range_contains_the_sizes_between_its_ends() -> None:
    assert [SizeRange(least=2, usual=2, most=4).holds(size) for size in range(1, 6)] == [False, True, True, True, False]


def test_a_profile_has_only_the_axes_of_the_contract() -> None:
    with pytest.raises(ValueError, match="ranges for batch, rows, source, step, found capacity, length"):
        Profile(sizes={name: SizeRange(least=1, usual=1, most=1) for name in ("batch", "capacity", "length")})


def test_a_tensor_has_a_smallest_a_typical_and_a_largest_shape() -> None:
    fixed = SPEC.fixed_axes(branches=False)
    shapes = {tensor.name: shapes_of(tensor, PROFILE, fixed) for tensor in inputs_of(SPEC, "decoder")}
    assert shapes[SPEC.tokens.name] == ((1, 1), (4, 1), (32, 3))
    assert shapes[SPEC.position.name] == ((), (), ())
    assert shapes[SPEC.source_mask.name] == ((1, 1), (2, 10), (8, 20))
    assert shapes[SPEC.memory[0].name] == ((1, 4, 1, 8), (2, 4, 10, 8), (8, 4, 20, 8))
    assert shapes[SPEC.past[1].name] == ((1, 4, 24, 8), (4, 4, 24, 8), (32, 4, 24, 8))


def test_the_parts_have_the_tensors_and_axes_of_the_contract() -> None:
    assert inputs_of(SPEC, "encoder") == SPEC.encoder_inputs()
    assert outputs_of(SPEC, "encoder") == SPEC.encoder_outputs()
    assert outputs_of(SPEC, "decoder") == SPEC.decoder_outputs()
    assert SPEC.want not in inputs_of(SPEC, "decoder")
    assert axes_of(inputs_of(SPEC, "encoder")) == ("batch", "source")
    assert axes_of(inputs_of(SPEC, "decoder")) == ("batch", "rows", "source", "step")


def test_a_plan_is_named_after_what_it_runs_on() -> None:
    single = plan_file("decoder", "tensorrt", "10.16.1", ("8.9",))
    assert single == "engines/decoder-tensorrt-10.16.1-sm89.plan"
    several = plan_file("encoder", "tensorrt-rtx", "1.7.1", ("8.6", "12.0"))
    assert several == "engines/encoder-tensorrt-rtx-1.7.1-portable.plan"


def test_an_inconsistent_record_is_refused_with_all_reasons() -> None:
    with pytest.raises(
        ValueError, match=r"found compute capability '86', compute capability '9', no profile, graph_sha256 'x'"
    ):
        replace(PLAN, compute_capabilities=("86", "9"), profiles=(), graph_sha256="x")
    with pytest.raises(ValueError, match="no compute capability"):
        replace(PLAN, compute_capabilities=())


def test_plans_are_listed_in_the_manifest(folder: Path) -> None:
    assert write_manifest(folder, MANIFEST_OF_IT).manifest.plans == (PLAN,)
    assert read_bundle(folder).manifest.plans == (PLAN,)


def test_a_plan_that_is_not_among_the_files_is_refused(folder: Path) -> None:
    (folder / PLAN.file).unlink()
    with pytest.raises(BundleError, match=re.escape(f"{PLAN.file}: manifest.json does not list it")):
        write_manifest(folder, MANIFEST_OF_IT)


def test_a_manifest_older_than_plans_has_none(folder: Path) -> None:
    write_manifest(folder, replace(MANIFEST_OF_IT, plans=()))
    values = json.loads((folder / MANIFEST).read_text())
    del values["plans"], values["digest"]
    values["format"] = [1, 2]
    (folder / MANIFEST).write_text(json.dumps({**values, "digest": digest_of(values)}))
    assert read_bundle(folder).manifest.plans == ()
    values["format"] = list(FORMAT)
    (folder / MANIFEST).write_text(json.dumps({**values, "digest": digest_of(values)}))
    with pytest.raises(BundleError, match="plans: missing"):
        read_bundle(folder)


@pytest.mark.parametrize("changed", [DECODER, WEIGHTS])
def test_the_hash_of_a_graph_covers_its_weights(folder: Path, changed: str) -> None:
    before = write_manifest(folder, MANIFEST_OF_IT).manifest
    (folder / changed).write_bytes(b"another")
    after = write_manifest(folder, MANIFEST_OF_IT).manifest
    assert graph_hash(before, "decoder") != graph_hash(after, "decoder")
    assert (graph_hash(before, "encoder") != graph_hash(after, "encoder")) == (changed == WEIGHTS)

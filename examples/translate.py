"""The example of the FAT article: train a translation model from a file of pairs, export it, translate with the bundle.

    python examples/translate.py build/real/zh-en-pairs.tsv --segment jieba --out build/translation

Each line of the file is a source, TAB, and its translation. As in the article, words of the source are separated by
blanks (``--segment jieba``), and the learning rate falls to nine tenths after every epoch.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import fatdeploy
from fatdeploy.export.training.data import Parts, read_parts
from fatdeploy.export.training.run import Training, TrainingPlan
from fatdeploy.export.training.settings import TrainSettings
from fatdeploy.export.training.trainer import Epoch
from fatdeploy.pairs import Pair

SHOWN = 5


def segmenter(name: str) -> Callable[[str], str]:
    """Return what separates the words of a source by blanks; training and device must use the same."""
    if name == "none":
        return lambda text: text
    try:
        jieba = importlib.import_module("jieba")
    except ImportError as error:
        sys.exit(f"--segment jieba needs jieba ({error}): pip install 'fatdeploy[segment]', or pass --segment none")
    return lambda text: " ".join(word for word in jieba.cut(text) if word.strip())


def write_pairs(path: Path, pairs: Sequence[Pair], segmented: Callable[[str], str]) -> None:
    """Write pairs with separated words."""
    path.write_text("".join(f"{segmented(pair.source)}\t{pair.target}\n" for pair in pairs), encoding="utf-8")


def train(parts: Parts, folder: Path, options: argparse.Namespace) -> None:
    """Train a model into a folder."""
    settings = TrainSettings(
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        warmup=options.warmup,
        schedule="step",
        gamma=0.9,
        select_by=options.select_by,
        device=options.device,
        threads=options.threads,
    )
    longest = {"max_source": options.longest, "max_target": options.longest}
    plan = TrainingPlan(
        preset=options.preset, changes=longest, tokenizer="bpe", vocab_size=options.vocab_size, settings=settings
    )
    with closing(Training(plan, parts, folder, resume=options.resume)) as training:
        for event in training.events():
            if isinstance(event, Epoch):
                losses = f"training loss {event.train_loss:.3f}, validation loss {event.score.loss:.3f}"
                print(f"epoch {event.number}: {losses}, token errors {event.score.token_error_rate:.1f} %", flush=True)
        training.finish()


def translate(bundle: Path, texts: list[str], segmented: Callable[[str], str], threads: int) -> list[str]:
    """Translate as a device does, which needs neither torch nor the checkpoint."""
    with fatdeploy.load(bundle, threads=threads) as model:
        return [best.text or "" for best in model.generate([segmented(text) for text in texts], num_beams=4)]


def main() -> None:
    """Read the options, then train, export and translate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, help="file of pairs: source, TAB, translation")
    parser.add_argument("--out", type=Path, required=True, help="folder for the pairs as trained, model and bundle")
    parser.add_argument("--segment", choices=["none", "jieba"], default="none", help="how sources become words")
    parser.add_argument("--preset", default="fat-small", help="the model; see: fatdeploy presets")
    parser.add_argument("--longest", type=int, default=256, help="most tokens of a source, and of a target")
    parser.add_argument("--vocab-size", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--select-by", default="loss", help="the validation metric that chooses the epoch to keep")
    parser.add_argument("--device", default="cpu", help="where to train: cpu or cuda")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="continue a stopped training")
    options = parser.parse_args()
    segmented = segmenter(options.segment)
    try:
        apart = run(options, segmented)
    except fatdeploy.FatdeployError as error:
        sys.exit(str(error))
    bundle = options.out / "bundle"
    targets = translate(bundle, [pair.source for pair in apart], segmented, options.threads)
    for pair, target in zip(apart, targets, strict=True):
        print(f"{pair.source}\n  {target}\n  (reference: {pair.target})")
    print(f"Next: fatdeploy eval {bundle} {options.out / 'validation.tsv'}")


def run(options: argparse.Namespace, segmented: Callable[[str], str]) -> Sequence[Pair]:
    """Train and export; return a few pairs that were kept apart, as they were before words were separated."""
    parts = read_parts(options.pairs, None)
    options.out.mkdir(parents=True, exist_ok=True)
    files = options.out / "train.tsv", options.out / "validation.tsv"
    for file, part in zip(files, (parts.train, parts.validation), strict=True):
        write_pairs(file, part.pairs, segmented)
    train(read_parts(*files), options.out / "model", options)
    fatdeploy.export_model(str(options.out / "model"), options.out / "bundle", force=True)
    return parts.validation.pairs[:SHOWN]


if __name__ == "__main__":
    main()

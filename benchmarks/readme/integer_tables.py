"""Tables of the quantized trained model: speed and fidelity against CTranslate2, and what an agreement means."""

from typing import Any

from benchmarks.readme.phrases import ENGINES, counted, shown, targets_list, where
from benchmarks.real.integers.agreement import facts_of
from benchmarks.real.integers.settings import BEAMS, PARTS, PEER_INT8, SHORTLIST
from benchmarks.real.integers.stages import best_settings, speed
from benchmarks.real.integers.targets import fidelity_of, integer_targets

Row = dict[str, Any]
FORMS = {
    "fp32": "fp32",
    "int8-latency": "int8 `--for latency`",
    "int8-throughput": "int8 `--for throughput`",
    f"int8-throughput{SHORTLIST}": "int8 `--for throughput`, shortlist",
    "int4": "int4",
    "float32": "fp32",
    PEER_INT8: "int8",
    f"{PEER_INT8}{SHORTLIST}": "int8, shortlist",
}
TITLES = {
    "greedy-alone": "a sentence alone, greedy",
    "greedy-bulk": "bulk, greedy",
    "beams-alone": f"a sentence alone, {BEAMS} beams",
    "beams-bulk": f"bulk, {BEAMS} beams",
    "shortlist-bulk": "bulk, greedy, the same shortlist",
}


def integer_speed_table(result: dict[str, Any]) -> str:
    """Return the speeds of our forms and of CTranslate2's best settings, and all targets."""
    lines = [
        f"| `{result['model']}`, trained | engine | p50 ms per sentence | tokens per second "
        "| times CTranslate2's best |",
        "|---|---|---|---|---|",
    ]
    for row in result["results"]:
        [peer] = best_settings(result["results"], row["part"], count=1)
        alone = PARTS[row["part"]].alone
        speeds = f"{row['sentence']['p50_ms']:.1f} | " if alone else f" | {row['tokens_per_second']['p50']:,.0f}"
        lines.append(f"| {TITLES[row['part']]} | {_engine(row)} | {speeds} | {speed(row) / speed(peer):.2f} |")
    # Judged anew from the rows: a result may be older than a target.
    targets = targets_list(integer_targets(result["results"], result["fidelity"], result["bundles"]))
    return "\n".join([*lines, "", *targets, "", _about(result)])


def integer_fidelity_table(result: dict[str, Any]) -> str:
    """Return how close each form is to its own fp32, and its size."""
    sizes = {row["form"]: row["bytes"] for row in result["bundles"]}
    lines = [
        "| engine | tokens of fp32 after fp32's own | unchanged sentences, greedy | with 4 beams "
        "| chrF against fp32's output, greedy | with 4 beams | MB |",
        "|---|---|---|---|---|---|---|",
    ]
    for greedy in (row for row in result["fidelity"] if row["beams"] == 1):
        engine, form = greedy["engine"], greedy["form"]
        beams = fidelity_of(result["fidelity"], engine, form, BEAMS)
        share = shown(greedy["forced"]["share"] if "forced" in greedy else None, ".2%")
        size = sizes.get(form) if engine == "fatdeploy" else None
        lines.append(
            f"| {ENGINES[engine]}, {FORMS.get(form, form)} | {share} | {_unchanged(greedy)} | {_unchanged(beams)} "
            f"| {greedy['chrf']:.1f} | {shown(beams.get('chrf'), '.1f')} "
            f"| {shown(None if size is None else size / 1e6, '.0f')} |"
        )
    return "\n".join([*lines, "", f"{where(result, ('onnxruntime', 'ctranslate2'))}. {_sentences(result)}"])


def agreement_table(result: dict[str, Any]) -> str:
    """Return what shares of equal tokens mean for translations, and the bundles that this was measured with."""
    head = (
        "| {first} | unchanged sentences | chrF against fp32's output | BLEU against fp32's output "
        "| chrF lost against references | BLEU lost against references |"
    )
    rows = result["results"]
    tables = [
        head.format(first="tokens of fp32 after fp32's own: by a line through the points below"),
        "|---|---|---|---|---|---|",
        *(_agreement_line(f"{level['agreement']:.0f} %", level) for level in result["levels"]),
        "",
        head.format(first="measured"),
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        facts = facts_of(row)
        name = f"{ENGINES[row['engine']]}, `{row['form']}`: {facts['agreement']:.2f} %"
        tables.append(_agreement_line(name, facts))
    scores = rows[0]["references"]["fp32"]
    about = (
        f"{_sentences(result)} {scores['sentences']} of them have references, their English originals, against which "
        f"fp32 has {scores['bleu']:.1f} BLEU and {scores['chrf']:.1f} chrF. A negative loss is a gain."
    )
    return "\n".join([*tables, "", f"{where(result, ('onnxruntime', 'ctranslate2', 'sacrebleu'))}. {about}"])


def _agreement_line(name: str, facts: dict[str, float]) -> str:
    return (
        f"| {name} | {facts['unchanged_share']:.0f} % | {facts['chrf']:.1f} | {facts['bleu']:.1f} "
        f"| {facts['chrf_lost']:.2f} | {facts['bleu_lost']:.2f} |"
    )


def _engine(row: Row) -> str:
    threads, form = counted(row["threads"], "thread"), FORMS.get(row["form"], row["form"])
    if row["engine"] == "fatdeploy":
        return f"{ENGINES['fatdeploy']}, {form}, {threads}"
    batch = "" if PARTS[row["part"]].alone else f", batches of {row['batch']}"
    return f"{ENGINES['ctranslate2']}, {form}, {counted(row['workers'], 'worker')} of {threads}{batch}"


def _unchanged(row: Row) -> str:
    return f"{row['unchanged']} of {row['sentences']}" if row else "–"


def _about(result: dict[str, Any]) -> str:
    noise = result["noise"]
    changed = {
        engine: max((row["changed"] for row in result["results"] if row["engine"] == engine), default=0)
        for engine in ("ctranslate2", "fatdeploy")
    }
    return (
        f"{where(result, ('onnxruntime', 'ctranslate2'))}. {_sentences(result)} "
        f"{counted(len(result['survey']), 'setting')} of CTranslate2 were tried, and its best of each part are shown. "
        f"Outputs that depend on how sentences are batched: at most {changed['ctranslate2']} in a setting of "
        f"CTranslate2, {changed['fatdeploy']} in ours. {noise['noisy_share']:.0%} of the turns ran while "
        f"fixed work was more than {noise['limit'] - 1:.0%} slower than its best."
    )


def _sentences(result: dict[str, Any]) -> str:
    return (
        f"{result['sentences']} sentences of Debian's Chinese manuals that were not calibrated on, "
        f"{result['source_tokens']:.0f} tokens on average."
    )

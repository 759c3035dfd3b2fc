"""Tables of trained models on real sentences: speed against CTranslate2, and the time of an export."""

from typing import Any

from benchmarks.readme.phrases import ENGINES, counted, targets_list, where
from benchmarks.real.targets import best, export_targets, speed, speed_targets


def real_speed_table(result: dict[str, Any]) -> str:
    """Return the speeds of our bundle and of every setting of CTranslate2."""
    rows = result["results"]
    peers = {part: best(rows, part, "ctranslate2") for part in ("alone", "bulk")}
    lines = [
        f"| `{result['model']}`, trained, fp32 | a sentence alone, p50 ms | in bulk, tokens per second "
        "| times CTranslate2's best | tokens |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        peer = peers[row["part"]]
        times = "–" if peer is None else f"{speed(row) / speed(peer):.2f}"
        alone = f"{row['sentence']['p50_ms']:.0f}" if row["part"] == "alone" else ""
        bulk = f"{row['tokens_per_second']['p50']:,.0f}" if row["part"] == "bulk" else ""
        lines.append(f"| {_setting(row)} | {alone} | {bulk} | {times} | `generate`'s, checked |")
    noise = result["noise"]
    about = (
        f"{result['sentences']} sentences of Debian's Chinese manuals, {result['source_tokens']:.0f} tokens in and "
        f"{result['target_tokens']:.0f} out on average, greedy; {noise['noisy_share']:.0%} of the turns ran while "
        f"fixed work was more than {noise['limit'] - 1:.0%} slower than its best."
    )
    # Judged anew from the rows: a result may be older than a target.
    judged = targets_list(speed_targets(rows))
    return "\n".join([*lines, "", *judged, "", f"{where(result, ('onnxruntime', 'ctranslate2'))}. {about}"])


def real_export_lines(result: dict[str, Any]) -> str:
    """Return how long exports of a trained model take."""
    about = f"Integers are calibrated on {result['calibration']} sentences and compared on {result['probes']} others."
    judged = targets_list(export_targets(result["export"]))
    return "\n".join([*judged, "", f"{where(result, ('torch', 'onnxruntime'))}. {about}"])


def _setting(row: dict[str, Any]) -> str:
    threads = counted(row["threads"], "thread")
    if row["engine"] == "fatdeploy":
        return f"{ENGINES['fatdeploy']}, {threads}"
    batch = f", batches of {row['batch']}" if row["part"] == "bulk" else ""
    return f"{ENGINES['ctranslate2']}, {counted(row['workers'], 'worker')} of {threads}{batch}"

"""The words that all generated tables share: machine, engines, settings, counts, targets."""

from typing import Any

from benchmarks.harness.targets import verdict

ENGINES = {
    "fatdeploy": "fatdeploy, ONNX Runtime",
    "ctranslate2": "CTranslate2",
    "plain": "plain `torch.onnx` export",
    "reference": "PyTorch reference",
}
# What engines are compared by: the difference of a long and a short decode, because CTranslate2 reports no more.
STEP = "per_token_by_difference"


def machine_line(result: dict[str, Any], packages: tuple[str, ...], threads: str) -> str:
    """Return where and with what decodes were measured, and of which length."""
    return f"{where(result, packages)}{threads}; source {result['source']} tokens, {result['target']} steps, fp32."


def where(result: dict[str, Any], packages: tuple[str, ...]) -> str:
    """Return where and with what a result was measured."""
    machine, versions = result["machine"], result["versions"]
    used = ", ".join(f"{package} {versions[package]}" for package in packages)
    return (
        f"Measured on {result['date']}: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB, {used}"
    )


def setting(row: dict[str, Any]) -> str:
    """Return the threads of an engine, and for CTranslate2 also the workers of its best setting."""
    threads = counted(row["threads"], "thread")
    return f"best: {counted(row['workers'], 'worker')} of {threads}" if row["engine"] == "ctranslate2" else threads


def counted(count: int, noun: str) -> str:
    """Return a number of things."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def shown(value: float | None, form: str) -> str:
    """Return a number, or a dash where there is none."""
    return "–" if value is None else format(value, form)


def targets_table(targets: list[dict[str, Any]]) -> list[str]:
    """Return each target, the result, and whether it is met; batches side by side."""
    batches = sorted({target["batch"] for target in targets if "batch" in target})
    cells: dict[str, dict[int, str]] = {}
    for target in targets:
        cells.setdefault(target["target"], {})[target.get("batch", batches[0])] = verdict(target)
    return [
        f"| {targets_met(targets)} | {' | '.join(f'batch {n}' for n in batches)} |",
        f"|---|{'---|' * len(batches)}",
        *(f"| {name} | {' | '.join(row.get(n, '') for n in batches)} |" for name, row in cells.items()),
    ]


def targets_met(targets: list[dict[str, Any]]) -> str:
    """Return how many targets are met."""
    return f"{sum(target['met'] is True for target in targets)} of {counted(len(targets), 'target')} are met"


def targets_list(targets: list[dict[str, Any]]) -> list[str]:
    """Return targets that have no batches."""
    return [
        f"| {targets_met(targets)} | |",
        "|---|---|",
        *(f"| {target['target']} | {verdict(target)} |" for target in targets),
    ]

"""Robust aggregation on the digits: accuracy of every rule when clients misbehave or fail.

    python experiments/robust.py --out runs/robust --methods fedavg --seeds 2023 2024 2025
    python experiments/robust.py --out runs/robust --methods fppl --seeds 2023
    python experiments/robust.py --out runs/faults --shares 0.1 0.2 0.4 --methods fedavg fppl pilora
    python experiments/robust.py --out runs/liars --methods hepco vfcl pmae glfc --rules mean median \
      --attacks weight counts sign_flip --rounds 2
    python experiments/robust.py --out runs/sums --rounds 2 --rules mean --attacks gram weight counts \
      --methods afcl stsa fedran fedranpac fedslca ccvr lorm regmean dolfin fot c2prompt
    python experiments/robust.py --out runs/sums --rounds 2 --rules mean --attacks gram weight counts \
      --methods afcl stsa fedran fedranpac fedslca ccvr lorm regmean dolfin fot c2prompt --unchecked all

10 clients with the same class mix (iid); 2 tasks, 3 rounds (`--rounds`) of 2 epochs. Either 2 clients are
malicious in all rounds, or, with `--shares`, each fault strikes so many of the clients, drawn anew in every
round. FedAvg averages a classifier on frozen features, FPPL and PILoRA have prompts and low-rank updates in
two blocks. HePCo, VFCL, pMAE and GLFC send more than parameters: class counts, variances, tokens, prototypes'
gradients. AFCL, STSA, FedRAN, FedRanPAC, FedSLCA, CCVR, LoRM, RegMean, DOLFIN, FOT and C2Prompt send sums of
features. With `--unchecked attackers` the attack `gram` sends larger sums than the checks allow, and with
`all` the server does not check them.

Every run is an ordinary `fcljax run`; runs that are there already are not made again. Prints A_last in % as
Markdown tables, mean over the seeds, with the number of uploads that were left out; a rule that a method
cannot follow is left out. VFCL follows other rules with `--merge average`.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array

import fcljax
from fcljax import cli
from fcljax.federated import attacks, claims, client_loop
from fcljax.federated.faults import ATTACKS, FAULTS
from fcljax.methods import METHODS as KNOWN
from fcljax.types import ClientContext, Program, Upload

COMMON = ["--tasks", "2", "--clients", "10", "--partition", "iid", "--epochs", "2"]
DECODER = Path(fcljax.__file__).parent / "assets" / "vit_micro_decoder.safetensors"
METHODS = {
    "fedavg": ["--adapter", "linear", "--lr", "1e-2"],
    "fppl": ["--prompt-blocks", "2", "--prompt-length", "5"],
    "pilora": ["--lora-blocks", "2"],
    "hepco": [
        *("--image-size", "16", "--pool-blocks", "2", "--pool-size", "20"),
        *("--generator-steps", "50", "--distill-steps", "100"),
    ],
    "vfcl": ["--image-size", "16"],
    "pmae": ["--image-size", "16", "--vpt-blocks", "2", "--tune-epochs", "1", "--decoder", str(DECODER)],
    "glfc": ["--image-size", "16", "--match-steps", "20", "--monitor-images", "5"],
    "afcl": [],
    "stsa": ["--projection", "500"],
    "fedran": ["--projection", "500"],
    "fedranpac": ["--projection", "500"],
    "fedslca": ["--image-size", "16"],
    "ccvr": ["--scale", "mini", "--lora-blocks", "2"],
    "lorm": ["--scale", "mini", "--lora-blocks", "2"],
    "regmean": ["--scale", "mini", "--lora-blocks", "2"],
    "fot": ["--scale", "mini", "--lora-blocks", "2"],
    "dolfin": ["--scale", "mini", "--lora-blocks", "2"],
    "c2prompt": ["--scale", "mini", "--image-size", "16", "--coda-blocks", "2", "--coda-components", "20"],
}
FOLLOWS = {"vfcl": ["--merge", "average"]}  # what makes a method follow other rules than the mean
RULES = {
    "mean": [],
    "median": ["--aggregator", "median"],
    "trimmed_mean, trim 0.2": ["--aggregator", "trimmed_mean", "--trim", "0.2"],
    "geometric_median": ["--aggregator", "geometric_median"],
    "krum, 2 assumed": ["--aggregator", "krum", "--malicious-bound", "2"],
    "multi_krum, 2 assumed": ["--aggregator", "multi_krum", "--malicious-bound", "2"],
    "centred_clipping, radius 1": ["--aggregator", "centred_clipping", "--clip-radius", "1.0"],
    "mean of changes clipped to 1": ["--clip-norm", "1.0"],
}


def main() -> None:
    """Make the missing runs and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/robust"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[2023])
    parser.add_argument("--methods", nargs="+", default=["fedavg", "fppl"], choices=METHODS)
    parser.add_argument("--rules", nargs="+", default=list(RULES), choices=RULES)
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS)
    parser.add_argument("--shares", nargs="+", default=[], help="of the clients, that each fault strikes")
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS, help="with --shares")
    parser.add_argument("--rounds", type=int, default=3, help="of a task")
    parser.add_argument("--unchecked", choices=("attackers", "all"), help="who does without checks of claims")
    options = parser.parse_args()
    if options.unchecked:
        # the attack `gram` else sends what the checks let through
        attacks.claims_hold = all_hold
        if options.unchecked == "all":
            client_loop.claims_hold = all_hold
        options.out = options.out / f"unchecked-{options.unchecked}"
    # rules differ on the server alone, so most programs are compiled once
    jax.config.update("jax_compilation_cache_dir", str(options.out / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    rules = {rule: [*RULES[rule], "--rounds", str(options.rounds)] for rule in options.rules}
    malicious = {attack: ["--malicious", "2", "--attack", attack] for attack in options.attacks}
    for method in options.methods:
        for share in options.shares:
            drawn = {f"{fault}-{share}": ["--faults", f"{fault}={share}"] for fault in options.faults}
            title = f"{method}, share {share}"
            print(table(title, method, drawn, options.seeds, options.out, rules), flush=True)
        if not options.shares:
            print(table(method, method, malicious, options.seeds, options.out, rules), flush=True)


def all_hold(program: Program, context: ClientContext, upload: Upload) -> Array:
    """Let every claim of an upload count as possible."""
    del context, upload
    return jnp.ones(len(claims.claims_of(program)), bool)


def table(
    title: str,
    method: str,
    faults: dict[str, list[str]],
    seeds: list[int],
    out: Path,
    rules: dict[str, list[str]],
) -> str:
    """The rows of one method: a line per rule, a column per fault."""
    lines = [f"| {title} | none | {' | '.join(name.partition('-')[0] for name in faults)} |"]
    lines += ["|---|" + "---|" * (1 + len(faults))]
    for rule, options in rules.items():
        if KNOWN[method].merges and rule != "mean" and method not in FOLLOWS:
            continue
        own = [*options, *(FOLLOWS.get(method, []) if rule != "mean" else [])]
        runs = {"none": [], **faults}
        cells = [accuracy(method, rule, own, name, fault, seeds, out) for name, fault in runs.items()]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def accuracy(
    method: str, rule: str, options: list[str], fault: str, own: list[str], seeds: list[int], out: Path
) -> str:
    """A_last in %, mean over the seeds; how many uploads were left out, and how many rounds had a result that
    was not kept, if any."""
    summaries = [load(method, rule, options, fault, own, seed, out) for seed in seeds]
    if not all(summaries):
        return "refused"
    mean = 100 * sum(summary["A_last"] for summary in summaries) / len(seeds)
    kinds = {"rejected_uploads": "left out", "refused_results": "rounds refused"}
    counts = {what: sum(summary[kind] for summary in summaries) for kind, what in kinds.items()}
    notes = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return f"{mean:.1f}" + (f" ({notes})" if notes else "")


def load(
    method: str, rule: str, options: list[str], fault: str, own: list[str], seed: int, out: Path
) -> dict:
    """The summary of one run, which is made if it is not there; empty: it is refused by name, such as counts
    where none are sent."""
    name = f"{method}-{rule.split(',')[0].replace(' ', '-')}-{fault}-{seed}"
    folder = out / name
    if not (folder / "summary.json").exists():
        arguments = ["run", method, *COMMON, *METHODS[method], *options, *own]
        arguments += ["--seed", str(seed), "--out", str(folder)]
        # 1: no upload was valid in any round, which is a result too
        code = cli.main(arguments)
        jax.clear_caches()
        if code == 2:
            return {}
        if code not in (0, 1):
            raise SystemExit(f"{name} failed")
    return json.loads((folder / "summary.json").read_text())


if __name__ == "__main__":
    main()

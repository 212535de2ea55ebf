"""Ranges that stand beside the fields of settings, and names that never collide."""

import dataclasses
import itertools
import re
import typing

import pytest
import small_runs
import yaml

from fcljax import config
from fcljax.adapters import ADAPTERS, find_adapter
from fcljax.choices import label_of
from fcljax.commands import running
from fcljax.errors import InputError
from fcljax.methods import METHODS, find_method
from fcljax.options import check_ranges, check_read, fields_of, help_of, option
from fcljax.pretraining.decoder import PretrainDecoderConfig
from fcljax.pretraining.encoder import PretrainConfig
from fcljax.runs.embed import EmbedConfig

RESULTS = small_runs.ROOT / "docs" / "results"
PRESETS = ["intended", "improved", "paper", "released"]


@dataclasses.dataclass(frozen=True)
class Own:
    """A field of every kind."""

    count: int = 3
    from_zero: int = option(0, least=0)
    up_to_nine: int = option(5, most=9)
    weight: float = 1.0
    rate: float = option(1e-3, positive=True)
    share: float = option(1.0, positive=True, most=1.0)
    trim: float = option(0.1, below=0.5)
    degrees: float = option(20.0, least=-90.0, most=90.0)
    maybe: float | None = option(None, positive=True)
    maybe_count: int | None = None
    flag: bool = False
    name: str = "0"


@pytest.mark.parametrize(
    "values",
    [
        {},
        dict(count=1, from_zero=0, up_to_nine=9, weight=0.0, share=1e-9, trim=0.0),
        dict(trim=0.4999, degrees=-90.0, maybe=0.1, maybe_count=1, flag=False),
        dict(weight=3, rate=1, share=1, trim=0),  # whole numbers where numbers are asked for
        dict(name="-1"),
    ],
)
def test_values_in_their_ranges_pass(values):
    check_ranges(Own(**values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(count=0), "count: 0 is too small; nearest valid value: 1"),
        (dict(from_zero=-1), "from_zero: -1 is too small; nearest valid value: 0"),
        (dict(up_to_nine=10), "up_to_nine: 10 is too large; nearest valid value: 9"),
        (dict(maybe_count=0), "maybe_count: 0 is too small; nearest valid value: 1"),
        (dict(weight=-0.1), "weight: -0.1 must be finite and 0 or more, such as 1.0"),
        (dict(weight=float("nan")), "weight: nan must be finite and 0 or more, such as 1.0"),
        (dict(weight=float("inf")), "weight: inf must be finite and 0 or more, such as 1.0"),
        (dict(rate=0.0), "rate: 0.0 must be finite and positive, such as 0.001"),
        (dict(rate=-1), "rate: -1 must be finite and positive, such as 0.001"),
        (dict(share=1.5), "share: 1.5 is too large; nearest valid value: 1.0"),
        (dict(trim=0.5), "trim: 0.5 is too large; it must be below 0.5"),
        (dict(degrees=-91.0), "degrees: -91.0 must be finite and -90.0 or more, such as 20.0"),
        (dict(maybe=0.0), "maybe: 0.0 must be finite and positive"),
    ],
)
def test_a_value_out_of_its_range_is_one_line_that_names_it_and_what_is_valid(values, message):
    with pytest.raises(InputError) as error:
        check_ranges(Own(**values))
    assert str(error.value) == message


@dataclasses.dataclass(frozen=True)
class Deciding:
    """An option that is read with some values of another only."""

    rule: str = "mean"
    trim: float = option(0.1, only=("rule", "trimmed"))


def test_an_option_that_nothing_reads_is_refused_where_it_was_given():
    check_read(Deciding())
    check_read(Deciding("trimmed", 0.3))
    check_read(Deciding("mean", 0.3), usual=Deciding("mean", 0.3))
    message = "^trim: only trimmed reads it, and rule is 'mean'; nearest: --rule trimmed$"
    with pytest.raises(InputError, match=message):
        check_read(Deciding("mean", 0.3))


# ---- the package's own options -----------------------------------------------------------------------------

RUNS = [
    (method, adapter)
    for method, adapter in itertools.product(METHODS, ADAPTERS)
    if adapter not in METHODS[method].excludes
]
USUAL = [(method, adapter) for method, adapter in RUNS if adapter == METHODS[method].adapter]
SOME_RUNS = small_runs.some(RUNS, USUAL)
GROUPS = {
    options for method, adapter in RUNS for options in config.option_groups(method, adapter).values()
} | {EmbedConfig, PretrainConfig, PretrainDecoderConfig}


@pytest.mark.parametrize(("method", "adapter"), SOME_RUNS)
def test_a_run_s_defaults_are_valid_and_those_of_the_intended_preset(method, adapter):
    cfg = config.resolve(config.run_class(method, adapter)())
    check_ranges(cfg)
    assert (cfg.method, cfg.adapter, cfg.fidelity) == (method, adapter, "intended")
    assert config.resolve(cfg) == cfg == config.from_mapping(method, {"adapter": adapter}, "test")


@pytest.mark.parametrize("options", sorted(GROUPS, key=lambda options: options.__name__))
def test_every_option_has_a_sentence_of_help_and_one_default(options):
    for field in fields_of(options):
        text = help_of(options).get(field.name, "")
        assert text[:1].isupper() and text.endswith("."), f"{options.__name__}.{field.name}: {text!r}"
        assert len(text.split()) > 2 and "default" not in text.lower(), f"{field.name}: {text!r}"


@pytest.mark.parametrize("options", sorted(GROUPS, key=lambda options: options.__name__))
def test_none_is_an_option_s_default_only_where_help_says_what_it_means(options):
    for field in fields_of(options):
        assert field.default is not None or field.metadata["unset"], f"{options.__name__}.{field.name}"


def test_few_shared_options_are_none():
    assert sum(field.default is None for field in fields_of(config.RunConfig)) <= 12 - 2


def test_null_in_a_file_of_an_earlier_version_is_the_default_that_stands_for_none():
    """Their files have null where 0 or a word stands now."""
    old = dict.fromkeys(("clip_norm", "norm_bound", "lanes", "lane_mode", "stem", "faults", "task_pool"))
    assert config.from_mapping("linear", old, "test") == config.from_mapping("linear", {}, "test")
    with pytest.raises(InputError, match="^lr: None is not a number"):
        config.from_mapping("linear", {"lr": None}, "test")


@pytest.mark.parametrize("options", sorted(GROUPS, key=lambda options: options.__name__))
def test_no_number_of_any_option_may_be_negative_infinite_or_nan(options):
    """A rule of the whole package: whoever needs another range says so beside the field."""
    wrong = {int: [-1], float: [-1.0, float("nan"), float("inf")]}
    for field in fields_of(options):
        kinds = typing.get_args(field.type) or (field.type,)
        for value in itertools.chain.from_iterable(wrong.get(kind, []) for kind in kinds):
            with pytest.raises(InputError, match=f"^{field.name}: "):
                check_ranges(dataclasses.replace(options(), **{field.name: value}))


@pytest.mark.parametrize("options", sorted(GROUPS, key=lambda options: options.__name__))
def test_a_learning_rate_or_a_temperature_of_zero_is_refused(options):
    names = [field.name for field in fields_of(options)]
    rates = [name for name in names if name == "lr" or name.endswith(("_lr", "temperature"))]
    for name in set(rates):
        with pytest.raises(InputError, match=f"^{name}: 0.0 must be finite and positive"):
            check_ranges(dataclasses.replace(options(), **{name: 0.0}))


@pytest.mark.parametrize("fidelity", PRESETS)
@pytest.mark.parametrize(("method", "adapter"), SOME_RUNS)
def test_a_preset_is_what_runs(method, adapter, fidelity):
    """Its instances of the options' dataclasses, field by field; without an `improved`, it is refused."""
    entry = find_method(method)
    assert set(entry.presets) <= set(PRESETS)
    chosen = entry.presets.get(fidelity, entry.presets["intended"])
    values = {"adapter": adapter, "fidelity": fidelity, "scale": "paper"}
    if fidelity == "improved" and fidelity not in entry.presets:
        with pytest.raises(
            InputError, match="^fidelity: .* has no preset 'improved', which fppl, fedavg, .*linear,"
        ):
            config.from_mapping(method, values, "test")
        return
    cfg = config.from_mapping(method, values, "test")
    of_adapters = {type(each): each for each in chosen.adapters}
    usual = find_adapter(adapter).presets
    own = of_adapters.get(find_adapter(adapter).options, usual.get(fidelity, usual["intended"]))
    for options in (config.part(entry.options(adapter), chosen.options), own):
        assert config.part(type(options), cfg) == options
    assert all(type(each) in {find_adapter(name).options for name in ADAPTERS} for each in chosen.adapters)
    assert (cfg.lr, cfg.partition) == (chosen.run.lr, label_of("partition", chosen.run.partition))


@pytest.mark.parametrize("method", METHODS)
def test_few_options_of_a_method_and_its_adapter_are_none(method):
    entry = find_method(method)
    own = (entry.options(entry.adapter), find_adapter(entry.adapter).options)
    unset = [field.name for options in own for field in fields_of(options) if field.default is None]
    expected = {"fppl": ["server_batch_size", "server_lr"]}
    expected |= {name: ["decoder"] for name in METHODS if name.endswith("pmae")}
    assert unset == expected.get(method, [])


# Defaults that papers or their releases state; docs/fidelity.md says where.
SOURCES = yaml.safe_load(
    """
    fppl: {temperature: 0.2, unified_weight: 1.0, server_epochs: 5, prompt_length: 20,
      prompt_blocks: 5}
    pilora: {prototype_weight: 0.001, hardness: 1.0, reweight_temperature: 0.2,
      prototype_init: 0.1, orthogonality_weight: 0.5, lora_rank: 4, lora_blocks: 1,
      lora_lr: 1.0e-5, weight_decay: 1.0e-5}
    pmae: {mask_ratio: 0.75, recon_length: 5, recon_weight: 1.0, restore_images: 4,
      tune_epochs: 5, tune_batch: 128, tune_lr: 0.001, vpt_length: 20, vpt_blocks: 5,
      lr: 0.001}
    ewc: {ewc_weight: 1000.0, fisher_measured: task, fisher_gradients: examples,
      fisher_limit: 0.0001, optimiser: sgd, lr: 0.01, momentum: 0.9, weight_decay: 0.0}
    lwf: {distill_weight: 3.0, distill_temperature: 2.0, optimiser: sgd, lr: 0.01,
      momentum: 0.9, weight_decay: 0.0005}
    icarl: {distill_weight: 1.0, distill_temperature: 2.0, memory_size: 200,
      optimiser: sgd, lr: 0.01, momentum: 0.9, weight_decay: 0.0005}
    joint: {rounds: 15}
    hepco: {kl_weight: 1.0, mse_weight: 0.1, generator_steps: 100, generator_growth: 50,
      generator_lr: 0.0001, generator_norm: true, noise_width: 64, replay_ratio: 0.5,
      distill_steps: 200, distill_lr: 0.0001, pool_size: 100, pool_length: 20,
      pool_blocks: 5, split_ratio: 0.1, imbalance: 1.0}
    fedprox: {prox_weight: 0.01}
    fed-cprompt: {contrast_near: 1000.0, contrast_far: 10.0, contrast_margin: 1.0}
    fedavg-ft: {lr: 5.0e-5}
    fedlwf-mc: {lr: 5.0e-5}
    cfed: {distill_weight: 0.1, distill_temperature: 2.0, reviewer_share: 0.4,
      server_steps: 0, server_batch: 128, lr: 5.0e-5}
    target: {distill_weight: 25.0, distill_temperature: 2.0, noise_lr: 0.01,
      label_weight: 0.5, adversarial_weight: 1.0, crop_padding: 0.125,
      student_temperature: 20.0, generator_lr: 0.002, lr: 5.0e-5}
    vfcl: {prior_weight: 1.0, global_share: 0.5, mc_samples: 1, init_std: 0.02,
      kl_scale: per_sample, exemplars: 20, full_lr: 0.01, lr: 0.01, optimiser: sgd,
      momentum: 0.0, rounds: 10, epochs: 5, batch_size: 32}
    glfc: {prototype_steps: 50, prototype_lr: 0.2, prototype_decay: 1.0e-5,
      aggregator: uniform, memory_size: 200, memory_repeats: false, entropy_unit: share,
      lr_schedule: constant, reset_best: arrival}
    lga: {loss_weight: 1.0, quiet_share: 0.6, aggregator: uniform, reset_best: arrival}
    fedweit: {sparse_weight: 0.001, mask_weight: 0.0, keep_weight: 100.0,
      prune_threshold: 0.001, client_sparsity: 0.3, kb_samples: 5, kb_tasks: 1,
      retroactive: true, aggregator: uniform, full_lr: 0.0003333333333333333}
    centralized-prompt: {clients: 1, rounds: 1, epochs: 20, partition: iid}
    mfcl: {finetune_weight: 1.0, distill_weight: 0.1, generator_lr: 0.001,
      entropy_weight: 1.0, statistics_weight: 50.0, smooth_weight: 0.001}
    lander: {bound_weight: 5.0, bound_radius: 0.015, current_weight: 0.2,
      previous_weight: 0.4, distill_temperature: 2.0, generator_lr: 0.002,
      label_weight: 0.5, adversarial_weight: 1.0, statistics_weight: 1.0,
      student_temperature: 20.0}
    scaffold: {optimiser: sgd, lr: 0.1}
    feddyn: {optimiser: sgd, lr: 0.1, dynamic_weight: 0.01}
    ditto: {personal_weight: 1.0}
    fedproto: {proto_weight: 1.0}
    lorm: {rounds: 5, lr: 0.0003, lora_lr: 0.0003, lora_rank: 16}
    dolfin: {memory_first: 0.95, memory_last: 1.0, lora_lr: 0.0005, lora_rank: 10}
    fot: {subspace_share: 0.87, subspace_growth: 0.001, sketch_columns: 5}
    fedknow: {signature_share: 0.1, signature_epochs: 2, signature_tasks: 10,
      distill_temperature: 2.0, rotation_margin: 0.5}
    c2prompt: {rounds: 3, lr: 0.01, coda_components: 80, coda_length: 10,
      compensation_length: 3, compensation_share: 0.5, kd_temperature: 3.0}
    fed-talora: {lora_rank: 4}
    fedslca: {lr: 0.01, align_epochs: 5, align_samples: 256, align_lr: 0.01,
      logit_norm: 0.1}
    """
)


@pytest.mark.parametrize("method", SOURCES)
def test_the_defaults_are_the_sources_numbers(method):
    cfg = config.preset(method, scale="paper")
    assert {name: getattr(cfg, name) for name in SOURCES[method]} == SOURCES[method]


def test_target_as_released_never_ends_its_warm_up():
    run = lambda fidelity: config.from_mapping("target", {"fidelity": fidelity}, "test")
    fields = ("synthesis_batch", "generator_steps", "generator_channels", "student_steps", "student_lr")
    for fidelity, rounds in (("released", 10), ("paper", 32)):
        assert [getattr(run(fidelity), name) for name in fields] == [256, 10, 64, 400, 0.2]
        assert run(fidelity).synthesis_rounds == rounds
    assert run("released").synthesis_warmup > run("released").synthesis_rounds


def test_fedavg_of_fppl_s_tables_sums_its_loss_over_all_classes_in_the_paper_and_never_fuses_prompts():
    run = lambda fidelity: config.from_mapping("fedavg", {"fidelity": fidelity}, "test")
    fields = ("wo_fusion", "gate_scale", "prompt_upload", "local_classes", "reduction")
    of = lambda fidelity: tuple(getattr(run(fidelity), name) for name in fields)
    prompts = (True, "fixed", "current")
    assert of("paper") == (*prompts, "all", "sum")
    assert of("intended") == of("released") == (*prompts, "current", "mean")


def test_mfcl_and_lander_as_released_have_their_releases_sizes():

    def run(method):  # mini takes less synthesis
        return config.from_mapping(method, {"fidelity": "released", "scale": "paper"}, "test")

    fields = ("synthetic_batch", "generator_batch", "label_temperature", "noise_width", "generator_channels")
    assert [getattr(run("mfcl"), name) for name in fields] == [128, 128, 1e3, 1000, 64]
    fields = ("synthetic_batch", "synthesis_rounds", "synthesis_batch", "synthesis_warmup", "student_lr")
    assert [getattr(run("lander"), name) for name in fields] == [128, 40, 256, 10, 0.1]


def test_fedweits_release_does_not_train_what_earlier_tasks_have_and_starts_elsewhere():
    run = lambda fidelity: config.from_mapping("fedweit", {"fidelity": fidelity}, "test")
    of = lambda fidelity: [getattr(run(fidelity), x) for x in ("retroactive", "mask_start", "adaptive_start")]
    assert of("intended") == [True, 0.9, 0.0]
    assert (of("paper"), of("released")) == ([True, 0.5, 1 / 3], [False, 0.5, 1 / 3])


def test_a_fidelity_that_a_method_lacks_is_said_with_what_runs_instead():
    def said(method, fidelity, **values):
        cfg = config.from_mapping(method, {"fidelity": fidelity, **values}, "test")
        return config.explain_fidelity(cfg)

    assert said("fppl", "paper") == said("ewc", "intended") == said("ewc", "released") == ""
    line = "fidelity: ewc has no preset 'paper': its options are those of intended; those of the images"
    assert said("ewc", "paper").startswith(line) and "normalise release" in said("ewc", "paper")
    assert "those of the adapter coda and the images" in said("ewc", "paper", adapter="coda")
    assert "adapter" not in said("ewc", "paper", adapter="lora")


def test_what_improved_would_change_is_known():
    of = lambda method, **values: config.improvement(config.from_mapping(method, values, "test"))
    assert of("fppl") == {"features": "both", "prototype_view": "clean"}
    assert of("pilora") == {"headtune": True, "train_share": 1.0}
    assert of("ewc") == {"headtune": True}
    assert of("fppl", fidelity="improved") == of("fppl", fidelity="paper") == of("afcl") == {}


def test_the_released_pilora_takes_the_images_and_the_deals_of_its_release():
    run = lambda fidelity: config.from_mapping("pilora", {"fidelity": fidelity}, "test")
    fields = ("preprocess", "normalise", "positions", "train_share", "class_order", "population")
    of = lambda fidelity: tuple(getattr(run(fidelity), name) for name in fields)
    assert of("released") == ("pilora", "release", "plain", 0.8, "natural", "independent")
    assert of("paper") == ("fppl", "release", "plain", 0.8, "shuffled", "static")
    assert of("intended") == ("fppl", "checkpoint", "antialiased", 0.8, "shuffled", "static")
    assert of("improved") == ("fppl", "checkpoint", "antialiased", 1.0, "shuffled", "static")


def test_what_is_given_wins_over_a_preset_of_the_run_s_own_fields():
    given = {"fidelity": "released", "train_share": 0.5, "population": "static"}
    found = config.from_mapping("pilora", given, "test")
    assert (found.train_share, found.population, found.class_order) == (0.5, "static", "natural")


def test_fppl_s_prototypes_are_of_augmented_images_unless_improved():
    view = lambda fidelity: config.from_mapping("fppl", {"fidelity": fidelity}, "test").prototype_view
    assert [view(fidelity) for fidelity in PRESETS] == ["augmented", "clean", "augmented", "augmented"]


# ---- names -------------------------------------------------------------------------------------------------


def entry_with(name):
    """A method's entry with one option of this name."""
    options = dataclasses.make_dataclass("Options", [(name, float, 1.0)], frozen=True)
    return dataclasses.replace(METHODS["linear"], presets=options)


def test_the_package_s_own_names_do_not_collide():
    for method, adapter in RUNS:
        groups = config.option_groups(method, adapter).values()
        names = [field.name for group in groups for field in dataclasses.fields(group)]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "owner"), [("lr", "run"), ("clip_norm", "run"), ("lora_rank", "mine"), ("full_lr", "mine")]
)
def test_an_option_that_takes_the_name_of_another_is_refused(name, owner, monkeypatch):
    """Of the run's, or of any adapter's, though it is not the method's default."""
    monkeypatch.setitem(METHODS, "mine", entry_with(name))
    with pytest.raises(InputError) as error:
        for adapter in ADAPTERS:
            config.option_groups("mine", adapter)
    assert str(error.value) == f"method: mine and {owner} both have an option {name!r}; rename one"


def test_an_option_of_its_own_name_is_taken(monkeypatch):
    monkeypatch.setitem(METHODS, "mine", entry_with("my_weight"))
    assert config.run_class("mine", "linear")().my_weight == 1.0
    config.run_class.cache_clear()
    config.preset.cache_clear()  # whose instances are of the classes that are gone


def test_an_adapter_s_option_goes_with_that_adapter_alone():
    assert config.from_mapping("linear", {"adapter": "lora", "lora_rank": 2}, "test").lora_rank == 2
    message = (
        "lora_rank is an option of the adapter 'lora', and this run has 'linear'; nearest: --adapter lora"
    )
    with pytest.raises(InputError, match=f"^test: {message}$"):
        config.from_mapping("linear", {"lora_rank": 2}, "test")
    with pytest.raises(InputError, match="^test: orthogonality_weight is an option of the adapter 'lora'"):
        config.from_mapping("pilora", {"adapter": "prompts", "orthogonality_weight": 1.0}, "test")


def test_an_option_of_other_methods_names_them():
    message = "test: --surrogate is an option of cfed, and fppl has none; leave it out"
    with pytest.raises(InputError, match=f"^{message}$"):
        config.from_mapping("fppl", {"surrogate": "digits"}, "test")
    with pytest.raises(
        InputError, match="^test: --decoder is an option of pmae, l2p-pmae, .*, and fppl has none"
    ):
        config.from_mapping("fppl", {"decoder": "file"}, "test")
    # a file of settings from before
    assert config.from_mapping("fppl", {"decoder": None}, "test") == config.from_mapping("fppl", {}, "test")


def test_a_method_s_defaults_hold_for_the_options_that_a_run_has():
    """EWC trains one pair for all tasks; on an adapter without pairs there is nothing to say of them."""
    assert config.run_class("ewc", "lora")().lora_pairs == "one"
    assert config.run_class("pilora", "lora")().lora_pairs == "task"
    assert not hasattr(config.run_class("ewc", "full")(), "lora_pairs")


def test_an_adapter_that_cannot_work_is_refused_with_the_reason():
    with pytest.raises(
        InputError, match=r"^adapter: fedncm cannot work with 'lora': nothing trains .*'linear'$"
    ):
        config.from_mapping("fedncm", {"adapter": "lora"}, "test")
    with pytest.raises(InputError, match="^adapter: unknown value 'lor'; did you mean 'lora'"):
        config.from_mapping("fedavg", {"adapter": "lor"}, "test")


# ---- scale -------------------------------------------------------------------------------------------------


def test_what_presets_have_for_mini_scale_are_options_of_the_method():
    for method in METHODS:
        values = find_method(method).presets["intended"].mini
        adapters = set(ADAPTERS) - set(find_method(method).excludes)
        groups = [group for each in adapters for group in config.option_groups(method, each).values()]
        known = [field.name for group in groups for field in fields_of(group)]
        assert set(values) <= set(known), method
        check_ranges(config.preset(method))


def test_the_rates_of_mini_scale_are_those_that_were_taken_on_held_out_images():
    """In bold in the tables of what was tried, GLFC's among those of earlier versions."""
    tried, earlier = ((RESULTS / name).read_text() for name in ("embedded.md", "history.md"))
    taken = re.findall(r"^\| (\S+) \| \*\*(--[^*]+)\*\*", tried, re.MULTILINE)
    assert len({method for method, _ in taken}) > 12
    (rate,) = re.findall(r"^\| glfc, `lr`, `full_lr` \|.*\*\*(\S+), \S+\*\*", earlier, re.MULTILINE)
    for method, given in [*taken, ("glfc", f"--lr {rate}")]:
        cfg = config.preset(method, scale="mini")
        for name, value in re.findall(r"--(\S+) (\S+)", given):
            assert getattr(cfg, name.replace("-", "_")) == float(value), (method, name)


@pytest.mark.parametrize(
    ("values", "scale", "why"),
    [
        ({}, "mini", "a micro one"),
        ({"backbone": "resnet_micro"}, "mini", "a micro one"),
        ({"backbone": "vit_tiny"}, "paper", "the network is vit_tiny"),
        ({"checkpoint": "weights.npz"}, "paper", "the network is weights.npz"),
        ({"backbone": "vit_micro", "checkpoint": "weights.npz"}, "paper", "the network is weights.npz"),
        ({"scale": "paper"}, "paper", "as --scale says"),
        ({"scale": "mini", "backbone": "vit_tiny"}, "mini", "as --scale says"),
    ],
)
def test_the_scale_is_that_of_the_network_unless_it_is_given(values, scale, why):
    cfg = config.from_mapping("hepco", values, "test")
    rates = {"paper": (1e-3, 1e-4), "mini": (1e-2, 1e-3)}
    assert (cfg.scale, cfg.lr, cfg.generator_lr) == (scale, *rates[scale])
    said = config.explain_scale(cfg)
    assert said.startswith(f"scale: {scale}, ") and why in said
    again = config.from_mapping("hepco", yaml.safe_load(config.to_yaml(cfg)), "test")
    assert again == cfg and config.explain_scale(again) == said


def test_what_is_given_wins_over_the_scale():
    assert config.from_mapping("hepco", {"lr": 0.5}, "test").lr == 0.5
    with pytest.raises(InputError, match="^scale: unknown value 'tiny'"):
        config.from_mapping("hepco", {"scale": "tiny"}, "test")


def test_a_file_with_the_scale_s_values_refuses_another_scale_and_one_without_takes_it(tmp_path):
    file = tmp_path / "config.yaml"
    paths = running.Paths(config=str(file))
    file.write_text(config.to_yaml(config.preset("hepco")))
    with pytest.raises(InputError, match=r"^scale: '.*config.yaml' has its own lr, generator_lr; leave out"):
        running.settings("hepco", {"scale": "paper"}, paths)
    assert running.settings("hepco", {"scale": "mini"}, paths).lr == 1e-2
    file.write_text("tasks: 3")
    assert running.settings("hepco", {"scale": "paper"}, paths).lr == 1e-3

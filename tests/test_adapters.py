"""What every adapter and classifier must hold: parts go back where they came from, slots of other tasks get
no gradient, clients hold what they need, and prompts are a function of the query."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import FORMULA, KEY, SCALE, SIZES, TASKS, WIDTH, resolved, rows_of

from fcljax import config
from fcljax.adapters import ADAPTERS, find_adapter
from fcljax.federated.communication import count_scalars
from fcljax.parts.classifiers import linear, nearest_mean, prototypes
from fcljax.parts.learner import learner
from fcljax.types import Frozen

PROMPTS = dict(adapter="prompts", prompt_length=3, prompt_blocks=2)
LORA = dict(adapter="lora", lora_rank=2, lora_blocks=2)
DUAL = dict(adapter="dualprompt", dual_length=2, dual_shared_length=2, dual_blocks=1, dual_shared_blocks=1)
CODA = dict(adapter="coda", coda_components=4, coda_length=2, coda_blocks=2)
VARIANTS = {
    "linear": dict(adapter="linear"),
    "full": dict(adapter="full", full_lr=0.5),
    "lora, a pair per task": LORA | dict(lora_lr=0.5),
    "lora, products": LORA | dict(local_lora="products", global_lora="products"),
    "lora, the current pair alone": LORA | dict(local_lora="current", global_lora="first"),
    "lora, one pair": LORA | dict(lora_pairs="one"),
    "pool": dict(adapter="pool", pool_size=3, pool_length=2, pool_blocks=2),
    "vpt": dict(adapter="vpt", vpt_length=2, vpt_blocks=2),
    "l2p": dict(adapter="l2p", l2p_size=3, l2p_length=2, l2p_top_k=2),
    "dualprompt": DUAL,
    "dualprompt, all of them sent": DUAL | dict(dual_upload="all"),
    "coda": CODA,
    "coda, all of them sent": CODA | dict(coda_upload="all"),
    "prompts": PROMPTS,
    "prompts, a fixed scale": PROMPTS | dict(gate_scale="fixed"),
    "prompts, the best task alone": PROMPTS | dict(wo_fusion=True),
    "prompts, all of them sent": PROMPTS | dict(prompt_upload="all"),
}
QUERIED = ("prompts", "pool", "l2p", "dualprompt", "coda")
SHARED = ("linear", "full", "lora, one pair", "pool", "vpt", "l2p")  # what they train belongs to no task
PAIR = 4 * 2 * 2 * WIDTH  # numbers of a pair in two blocks
QUERY = rows_of([0, 1, 2, 3]).input
EVERY = jnp.ones(4, bool)  # rows of a batch without padding
every = pytest.mark.parametrize("variant", VARIANTS)
OWN_START = ("dualprompt", "coda")  # how their tasks start and what they train is in test_pmae_adapters.py
of_tasks = pytest.mark.parametrize(
    "variant", [name for name in VARIANTS if name not in SHARED and not name.startswith(OWN_START)]
)
of_prompts = pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("prompts")])


def adapter_of(variant):
    cfg = resolved("fppl", **VARIANTS[variant])
    entry = find_adapter(cfg.adapter)
    return entry.build(config.part(entry.options, cfg), SIZES, FORMULA)


def random(tree, seed=0):
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(lambda x: jnp.asarray(draw(size=x.shape), x.dtype), tree)


def params_of(adapter, seed=0):
    """Parameters of which none is 0, as after some training."""
    return random(adapter.init(KEY, SCALE), seed)


def same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def is_slot(x):
    return x.ndim and x.shape[0] == SIZES.tasks


def feature(adapter, cached, trainable, task, train=True):
    """What the classifier reads."""
    injection = adapter.inject(cached, trainable, QUERY, task, train, EVERY) if adapter.inject else None
    params = adapter.network(trainable) if adapter.network else SCALE.network
    return adapter.feature(FORMULA.apply(params, QUERY, injection, train)[0])


def test_every_adapter_is_here():
    assert {options["adapter"] for options in VARIANTS.values()} == set(ADAPTERS)


# ---- trainable parameters ----------------------------------------------------------------------------------


@every
def test_putting_back_what_was_taken_changes_nothing(variant):
    adapter = adapter_of(variant)
    params = params_of(adapter)
    back = jax.jit(lambda task: adapter.merge(params, task, adapter.trainable(params, task)))
    for task in TASKS:
        same(back(task), params)
    assert back._cache_size() == 1  # the task is data


@every
def test_what_was_put_is_what_is_taken(variant):
    adapter = adapter_of(variant)
    params = params_of(adapter)
    for task in TASKS:
        trainable = random(adapter.trainable(params, task), 1)
        same(adapter.trainable(adapter.merge(params, task, trainable), task), trainable)


@of_tasks
def test_putting_a_part_leaves_the_slots_of_other_tasks_bit_for_bit(variant):
    """Of prompts the gate belongs to all tasks, and of those that are all sent the rest is a constant."""
    adapter = adapter_of(variant)
    params, task = params_of(adapter), TASKS[1]
    trainable = random(adapter.trainable(params, task), 1)
    if variant == "prompts, all of them sent":
        trainable = trainable._replace(prompt=params.prompt.at[1].set(trainable.prompt[1]))
    after = adapter.merge(params, task, trainable)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(after), strict=True)
    slots = [(old, new) for old, new in pairs if old.ndim > 2]
    assert slots and all(is_slot(old) for old, _ in slots)
    for old, new in slots:
        np.testing.assert_array_equal(new[0], old[0])
        assert (new[1] != old[1]).all()


@every
def test_a_task_opens_with_what_there_is_or_with_the_prompt_before_it(variant):
    adapter = adapter_of(variant)
    params = params_of(adapter)
    if not variant.startswith("coda"):
        same(adapter.open_task(params, TASKS[0]), params)
    opened = adapter.open_task(params, TASKS[1])
    if variant.startswith(OWN_START):
        assert jax.tree.map(jnp.shape, opened) == jax.tree.map(jnp.shape, params)
    elif VARIANTS[variant]["adapter"] == "prompts":
        same(opened._replace(prompt=params.prompt), params)
        np.testing.assert_array_equal(opened.prompt[1], params.prompt[0])
        np.testing.assert_array_equal(opened.prompt[0], params.prompt[0])
    else:
        same(opened, params)


# ---- gradients ---------------------------------------------------------------------------------------------


@of_tasks
def test_slots_of_other_tasks_get_a_gradient_of_exactly_zero(variant):
    adapter = adapter_of(variant)
    params = params_of(adapter)

    @jax.jit
    def slopes(task):
        loss = lambda cached, trainable: jnp.sum(feature(adapter, cached, trainable, task) ** 2)
        return jax.grad(loss, argnums=(0, 1))(adapter.cached(params), adapter.trainable(params, task))

    for task in TASKS:
        by_cached, by_trainable = slopes(task)
        assert not any(leaf.any() for leaf in jax.tree.leaves(by_cached))
        slots = by_trainable.prompt if adapter.prompt else by_trainable
        if variant == "prompts, all of them sent":
            current = jnp.arange(SIZES.tasks) == task.index
            assert not slots[~current].any()
            slots = slots[current]
        if variant != "prompts, the best task alone":  # whose prompt may be another task's
            assert all(leaf.all() for leaf in jax.tree.leaves(slots))
    assert slopes._cache_size() == 1


@of_tasks
def test_pairs_and_prompts_of_coming_tasks_are_not_read(variant):
    adapter = adapter_of(variant)
    params = params_of(adapter)
    poison = lambda x: x.at[1].set(jnp.nan) if x.ndim > 2 and is_slot(x) else x
    poisoned = jax.tree.map(poison, params)
    if adapter.prompt:  # a weight of 0 times NaN is NaN: numbers that are not fused must be finite
        poisoned = params._replace(prompt=params.prompt.at[1].set(9.0))
    for train in (True, False):
        whole, other = (
            feature(adapter, each, adapter.trainable(each, TASKS[0]), TASKS[0], train)
            for each in (params, poisoned)
        )
        np.testing.assert_array_equal(whole, other)


# ---- what clients hold, train and read ---------------------------------------------------------------------


@every
def test_what_clients_hold_is_enough_to_train(variant):
    adapter = adapter_of(variant)
    params = params_of(adapter)
    for task in TASKS:
        trainable = adapter.trainable(params, task)
        np.testing.assert_array_equal(
            feature(adapter, adapter.cached(params), trainable, task),
            feature(adapter, params, trainable, task),
        )


@pytest.mark.parametrize(
    ("variant", "trained", "sent", "cached"),
    [
        ("linear", 0, 0, 0),
        ("full", WIDTH, WIDTH, 0),
        ("lora, a pair per task", PAIR, PAIR, 2 * PAIR),
        ("lora, the current pair alone", PAIR, PAIR, PAIR),  # the A of all tasks
        ("lora, one pair", PAIR, PAIR, 0),
        ("prompts", 24 + 2 * WIDTH + 1, 24 + 2 * WIDTH + 1, 48),
        ("prompts, a fixed scale", 24 + 2 * WIDTH, 24 + 2 * WIDTH, 48),
        ("prompts, all of them sent", 24 + 2 * WIDTH + 1, 48 + 2 * WIDTH + 1, 0),
    ],
)
def test_numbers_that_train_travel_and_are_cached(variant, trained, sent, cached):
    adapter = adapter_of(variant)
    params = params_of(adapter)
    trainable = adapter.trainable(params, TASKS[1])
    assert count_scalars(adapter.counted(trainable, TASKS[1])) == trained
    assert (count_scalars(trainable), count_scalars(adapter.cached(params))) == (sent, cached)


@every
def test_an_adapter_says_what_it_reads_and_at_which_rate_it_trains(variant):
    adapter, name = adapter_of(variant), VARIANTS[variant]["adapter"]
    assert adapter.plain == (name == "linear")
    assert adapter.queries == (name in QUERIED)
    assert (adapter.prompt is not None) == (name in (*QUERIED, "vpt"))
    rate = {"lora": resolved("fppl", **VARIANTS[variant]).lora_lr} if name == "lora" else {"full": 0.5}
    assert adapter.rate == rate.get(name)
    model = learner(FORMULA, adapter, linear(WIDTH, SIZES.classes))
    assert model.queries == (name in (*QUERIED, "linear"))


def test_evaluation_may_use_other_pairs_than_training():
    adapter = adapter_of("lora, the current pair alone")
    params = params_of(adapter)
    of_task = lambda index: (adapter.trainable(params, TASKS[index]), TASKS[index])
    in_task = lambda train, index: feature(adapter, params, *of_task(index), train)
    np.testing.assert_array_equal(in_task(True, 0), in_task(False, 0))  # the first pair is the current one
    assert jnp.abs(in_task(True, 1) - in_task(False, 1)).max() > 0.01
    np.testing.assert_array_equal(in_task(False, 1), in_task(False, 0))


def test_the_whole_network_trains_in_float32_from_the_frozen_values():
    adapter = adapter_of("full")
    params = adapter.init(KEY, Frozen({"scale": jnp.full(WIDTH, 1.5, jnp.bfloat16)}))
    assert params["scale"].dtype == jnp.float32 and params["scale"].tolist() == [1.5] * WIDTH
    moved = {"scale": jnp.arange(4.0)}
    np.testing.assert_array_equal(feature(adapter, (), moved, TASKS[0]), QUERY * jnp.arange(4.0))


# ---- prompts -----------------------------------------------------------------------------------------------


@of_prompts
def test_prompts_are_those_that_are_injected_in_training_and_in_evaluation(variant):
    adapter = adapter_of(variant)
    params = params_of(adapter)
    for task in TASKS:
        trainable = adapter.trainable(params, task)
        prompt = adapter.prompt(adapter.cached(params), trainable, QUERY, task)
        assert prompt.shape == (4, 2, 3, WIDTH)
        for cached, train in ((adapter.cached(params), True), (params, False)):
            injection = adapter.inject(cached, trainable, QUERY, task, train, EVERY)
            assert sorted(injection.prompt) == [0, 1] and not injection.lora
            for block in (0, 1):
                np.testing.assert_array_equal(injection.prompt[block], prompt[:, block])


@of_prompts
def test_the_prompt_of_an_image_is_a_function_of_its_own_query(variant):
    adapter = adapter_of(variant)
    params = params_of(adapter)
    prompt = lambda query: adapter.prompt(params, adapter.trainable(params, TASKS[1]), query, TASKS[1])
    together = prompt(QUERY)
    for row in range(4):
        np.testing.assert_allclose(prompt(QUERY[row : row + 1])[0], together[row], atol=1e-6)
    np.testing.assert_array_equal(prompt(QUERY[::-1]), together[::-1])
    assert jnp.abs(prompt(-QUERY) - together).max() > 0.01


# ---- classifiers -------------------------------------------------------------------------------------------

CLASSIFIERS = {
    "linear": linear(WIDTH, SIZES.classes),
    "prototypes": prototypes(WIDTH, SIZES.classes),
    "class means": nearest_mean(WIDTH, SIZES.classes),
    "class means beside a linear one": nearest_mean(WIDTH, SIZES.classes, inner=linear(WIDTH, SIZES.classes)),
    "class means beside prototypes": nearest_mean(
        WIDTH, SIZES.classes, inner=prototypes(WIDTH, SIZES.classes)
    ),
}
of_classifiers = pytest.mark.parametrize("name", CLASSIFIERS)


@of_classifiers
def test_a_classifier_s_trainable_parameters_go_back_where_they_came_from(name):
    """The second task has a padding class, whose row is dropped."""
    classifier = CLASSIFIERS[name]
    params = random(classifier.init(KEY))
    back = jax.jit(lambda task: classifier.merge(params, task, classifier.trainable(params, task)))
    for task in TASKS:
        same(back(task), params)
    trainable = random(classifier.trainable(params, TASKS[1]), 1)
    after = classifier.merge(params, TASKS[1], trainable)
    taken = classifier.trainable(after, TASKS[1])
    real = lambda tree: jax.tree.map(lambda x: x[:2] if x.shape == (3, WIDTH) else x, tree)
    same(real(taken), real(trainable))


@of_classifiers
def test_a_classifier_s_cached_parameters_are_enough_for_the_logits_of_training(name):
    classifier = CLASSIFIERS[name]
    params, task = random(classifier.init(KEY)), TASKS[1]
    trainable = classifier.trainable(params, task)
    logits = classifier.logits(classifier.cached(params), trainable, QUERY, task)
    assert logits.shape == (4, SIZES.classes)
    if name != "class means":  # where nothing trains there are none
        by_hand = {"linear": lambda head: QUERY @ head.kernel + head.bias, "prototypes": nearest}
        rule = by_hand["prototypes" if "prototypes" in name else "linear"]
        np.testing.assert_allclose(logits, rule(getattr(params, "inner", params)), rtol=1e-5)


def nearest(prototypes):
    return -jnp.linalg.norm(QUERY[:, None] - prototypes, axis=-1) / WIDTH**0.5


def test_only_the_prototypes_of_the_task_get_a_gradient():
    classifier = CLASSIFIERS["prototypes"]
    params = random(classifier.init(KEY))
    for task, real in zip(TASKS, (3, 2), strict=True):
        loss = lambda cached, trainable, task=task: jnp.sum(classifier.logits(cached, trainable, QUERY, task))
        by_cached, by_trainable = jax.grad(loss, argnums=(0, 1))(params, classifier.trainable(params, task))
        own = task.classes[task.classes >= 0]
        assert not by_cached[own].any() and by_trainable[:real].all() and not by_trainable[real:].any()

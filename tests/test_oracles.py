"""Losses and merges written a second time in numpy, number by number, from the papers' equations: VFCL (no
code was released), HePCo (section 4.2) and SLCA's classifier alignment. They share no function with the
package, and take float64 and loops where it takes float32 and batches. Gradients are compared with
differences of the second writing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from micro import FORMULA, KEY, SCALE, SIZES, TASKS, context_of, info_of, rows_of, seen_by_rules
from micro import round_context_of as now
from test_hepco import world
from test_vfcl import fresh, method_of, run_of

from fcljax.federated.aggregation import AggregationOptions, make_aggregation
from fcljax.methods.fedslca import FedSLCAOptions, align_classifier, shrunk
from fcljax.methods.hepco import hepco as H
from fcljax.methods.vfcl.bayesian import bayesian
from fcljax.methods.vfcl.posterior import Flat, Posterior
from fcljax.methods.vfcl.vfcl import ClientPrior, VFCLOptions, conflation, two_priors
from fcljax.models.heads import Head
from fcljax.parts.class_gaussians import Gaussians, draw_features
from fcljax.parts.classifiers import linear
from fcljax.parts.client import ClientStep
from fcljax.parts.learner import Params, learner

WIDTH, CLASSES = FORMULA.width, SIZES.classes
SEEN = np.asarray(TASKS[1].seen)
KNOWN = np.arange(CLASSES) < 2  # classes that the client's head had at the end of the task before


def slopes(value, at, width=1e-5):
    """Central differences of a number by each number of an array."""
    found = np.zeros_like(at)
    for i in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[i] = width
        found[i] = (value(at + step) - value(at - step)) / (2 * width)
    return found


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4 * np.abs(expected).max())


# ---- VFCL --------------------------------------------------------------------------------------------------


def softplus(rho):
    return np.log1p(np.exp(rho))


def density(w, mean, rho):
    sigma = softplus(rho)
    return np.exp(-((w - mean) ** 2) / (2 * sigma**2)) / (sigma * np.sqrt(2 * np.pi))


def body_loss(theta, noise, sent, own, share):
    """Eq. 6 and 9 of the shared part: log q(w) - log(lambda_k N_global + (1 - lambda_k) N_own), w drawn."""
    total = 0.0
    for (mean, rho), eps, of_all, of_client in zip(theta, noise, sent, own, strict=True):
        w = mean + softplus(rho) * eps
        prior = share * density(w, *of_all) + (1 - share) * density(w, *of_client)
        total += np.log(density(w, mean, rho)) - np.log(prior)
    return total


def head_loss(theta, noise, own):
    """The same of the classifier, whose prior is its own of the task before, or N(0, 1) for a new class."""
    total = 0.0
    for row in range(WIDTH + 1):  # weights and the bias
        for c in np.flatnonzero(SEEN):
            mean, rho = theta[row, c]
            w = mean + softplus(rho) * noise[row, c]
            prior = density(w, *own[row, c]) if KNOWN[c] else np.exp(-(w**2) / 2) / np.sqrt(2 * np.pi)
            total += np.log(density(w, mean, rho)) - np.log(prior)
    return total


def gaussians(seed, *shape):
    """(mean, rho) of so many parameters."""
    draw = np.random.default_rng(seed)
    return np.stack([draw.normal(size=shape), draw.normal(-0.5, 0.3, size=shape)], axis=-1)


def posterior_of(body, head):
    def of(field):
        kernel, bias = jnp.float32(head[:-1, :, field]), jnp.float32(head[-1, :, field])
        return {"scale": jnp.float32(body[:, field])}, Head(kernel, bias)

    (mean, head_mean), (rho, head_rho) = of(0), of(1)
    return Params(Posterior(mean, rho), Posterior(head_mean, head_rho))


@pytest.mark.long
@pytest.mark.parametrize("before", [True, False])
def test_vfcls_priors_and_their_gradients(before):
    """With a task before the prior is a mixture; without, it is the global posterior alone."""
    options, examples = VFCLOptions(prior_weight=3.0, global_share=0.3), 7
    body, sent, own = (gaussians(seed, WIDTH) for seed in (1, 2, 3))
    head, old_head = gaussians(4, WIDTH + 1, CLASSES), gaussians(5, WIDTH + 1, CLASSES)
    draw = np.random.default_rng(6)
    noise, head_noise = draw.normal(size=WIDTH), draw.normal(size=(WIDTH + 1, CLASSES))
    method = method_of()
    context = context_of(method, fresh(method), TASKS[1], info_of(CLASSES, examples), SCALE)
    context = context._replace(payload=context.payload._replace(trainable=posterior_of(sent, old_head)))
    mine = posterior_of(own, old_head)
    flat = Posterior(*map(Flat.of, mine.adapter))  # as a Bayesian learner has it
    prior = ClientPrior(flat, mine.classifier, jnp.asarray(KNOWN), jnp.int32(0 if before else -1))
    rule = two_priors(options, run_of())
    model = bayesian(learner(FORMULA, run_of().adapter, linear(WIDTH, CLASSES)), 0.1)

    def value(trainable):
        eps = Head(jnp.float32(head_noise[:-1]), jnp.float32(head_noise[-1]))
        drawn = Params(
            jax.tree.map(lambda m, r: m + jax.nn.softplus(r) * jnp.float32(noise), *trainable.adapter),
            jax.tree.map(lambda m, r, e: m + jax.nn.softplus(r) * e, *trainable.classifier, eps),
        )
        return rule.loss(ClientStep(model, context, trainable, None, rows_of([3, 4]), KEY, drawn), prior)

    share = options.global_share if before else 1.0
    scale = options.prior_weight / examples
    by_body = lambda theta: scale * body_loss(theta, noise, sent, own, share)
    by_head = lambda theta: scale * head_loss(theta, head_noise, old_head)
    found, gradient = jax.value_and_grad(value)(posterior_of(body, head))
    close(found, by_body(body) + by_head(head))
    close(np.stack([x["scale"] for x in gradient.adapter], -1), slopes(by_body, body))
    expected = slopes(by_head, head)
    close(np.stack([x.kernel for x in gradient.classifier], -1), expected[:-1])
    close(np.stack([x.bias for x in gradient.classifier], -1), expected[-1])


@pytest.mark.parametrize(("merge", "times"), [("conflation", 1), ("tempered", 3)])
def test_vfcls_merge_is_the_product_of_the_clients_gaussians(merge, times):
    """Eq. 11, parameter by parameter; tempered: its variance times the number of clients."""
    clients, head = [gaussians(seed, WIDTH) for seed in (1, 2, 3)], gaussians(4, WIDTH + 1, CLASSES)
    rule = conflation(VFCLOptions(merge=merge), make_aggregation(AggregationOptions()), CLASSES)
    began = posterior_of(clients[0], head)
    sent = [rule.pre(posterior_of(each, head), began, jnp.float32(9)) for each in clients]
    assert [float(weight) for _, weight in sent] == [1, 1, 1]  # whatever the examples
    mean = jax.tree.map(lambda *x: sum(x) / 3, *[upload for upload, _ in sent])
    found, rho = rule.post(mean, began, (), jnp.float32(3), KEY)[0].adapter
    for i in range(WIDTH):
        precision = sum(1 / softplus(each[i, 1]) ** 2 for each in clients)
        centre = sum(each[i, 0] / softplus(each[i, 1]) ** 2 for each in clients) / precision
        close(found["scale"][i], centre)
        close(softplus(np.float64(rho["scale"][i])), np.sqrt(times / precision))


# ---- HePCo -------------------------------------------------------------------------------------------------


def class_logits(model, z):
    kernel, bias = (np.asarray(x, np.float64) for x in model.classifier)
    return (z @ kernel + bias)[SEEN]


def probabilities(logits):
    shares = np.exp(logits - logits.max())
    return shares / shares.sum()


def prompt(model, z):
    """sum_m cos(q, K_m) P_m in every block, without a softmax."""
    prompts, keys = (np.asarray(x, np.float64) for x in (model.adapter.prompt, model.adapter.key))
    found = np.zeros((len(keys), *prompts.shape[2:]))
    for block, of_block in enumerate(keys):
        for m, key in enumerate(of_block):
            found[block] += z @ key / np.linalg.norm(z) / np.linalg.norm(key) * prompts[block, m]
    return found


def apart(one, other, z):
    return np.sum((prompt(one, z) - prompt(other, z)) ** 2)


def surprise(model, z, label):
    """Cross-entropy of a label among the seen classes."""
    return -np.log(probabilities(class_logits(model, z))[np.flatnonzero(SEEN).tolist().index(label)])


def generator_loss(z, labels, server, clients, mse):
    """Eq. 2 to 5: latents that clients recognise, and on which they and the server disagree."""
    total = 0.0
    for one, label in zip(z, labels, strict=True):
        p = probabilities(class_logits(server, one))
        for client in clients:
            total += surprise(client, one, label)
            total -= np.sum(p * np.log(p / probabilities(class_logits(client, one))))  # KL(server, client)
            total -= mse * apart(server, client, one)
    return total


@pytest.mark.long
def test_hepcos_losses_and_their_gradients():
    options, _, model, params, aggregate, past = world(fidelity="paper")
    task = TASKS[1]
    around = seen_by_rules(model, now(task, frozen=SCALE), aggregate)
    examples = aggregate.gather["class_examples"].astype(jnp.float32)
    clients = H.client_teachers(options, around, params, examples)
    previous, study = H.previous_teacher(params, past, task), H.LatentModel(options, model, params, task)
    draw = np.random.default_rng(0)
    z, old_z = draw.normal(size=(4, WIDTH)), draw.normal(size=(2, WIDTH))
    labels, old_labels = [3, 4, 4, 3], [0, 2]
    two = [jax.tree.map(lambda x, i=i: x[i], clients.trainable) for i in (0, 1)]  # the third is not valid
    server, before = study.trainable, jax.tree.map(lambda x: x[0], previous.trainable)

    gaps = H.prompt_gaps(study, clients)
    value = lambda z: H.generator_loss(study, clients, gaps, z, jnp.asarray(labels))
    found, gradient = jax.jit(jax.value_and_grad(value))(jnp.float32(z))
    by_hand = lambda z: generator_loss(z, labels, server, two, options.mse_weight)
    close(found, by_hand(z))
    close(gradient, slopes(by_hand, z))

    latents = lambda z, y: H.Latents(jnp.float32(z), jnp.asarray(y))
    batch = H.Composite(latents(z, labels), latents(old_z, old_labels))
    new = sum(apart(server, client, one) for one in z for client in two)  # eq. 6
    old = sum(apart(server, before, one) for one in old_z)
    close(H.prompt_loss(study, clients, previous, server, batch), new + old)
    every = zip([*z, *old_z], [*labels, *old_labels], strict=True)
    expected = np.mean([surprise(server, one, label) for one, label in every])
    close(H.label_loss(study, previous, server, batch), expected)


# ---- SLCA --------------------------------------------------------------------------------------------------


def alignment_loss(weights, x, y, task_of, temperature):
    """SLCA, section 3.3: cross-entropy of logits over their length and a temperature. The length is the mean
    over tasks of the length of a task's logits."""
    total = 0.0
    for feature, label in zip(x, y, strict=True):
        logits = np.append(feature, 1.0) @ weights
        lengths = [np.sqrt(np.sum(logits[task_of == t] ** 2)) for t in sorted(set(task_of))]
        unit = logits / np.mean(lengths) / temperature
        total += np.log(np.sum(np.exp(unit))) - unit[label]
    return total / len(y)


def aligned_by_hand(weights, epochs, task_of, options):
    """SGD with momentum and weight decay over batches of as many features as a class has, its rate falling
    along a cosine over the epochs."""
    velocity, size = np.zeros_like(weights), options.align_samples
    for number, (features, labels) in enumerate(epochs):
        rate = options.align_lr * (1 + np.cos(np.pi * number / len(epochs))) / 2
        for i in range(len(task_of)):
            x, y = features[i * size : (i + 1) * size], labels[i * size : (i + 1) * size]

            def loss(w, x=x, y=y):
                return alignment_loss(w, x, y, task_of, options.logit_norm)

            velocity = 0.9 * velocity + slopes(loss, weights) + options.align_decay * weights
            weights = weights - rate * velocity
    return weights


@pytest.mark.long
def test_slcas_alignment_is_descent_on_normalised_logits():
    options = FedSLCAOptions(align_epochs=3, align_samples=4, align_lr=0.05, align_decay=0.1)
    task_of = np.array([0, 0, 1])
    means = jnp.array([[1.0, 0.2], [-0.3, 2.0], [1.5, 1.0]])
    roots = 0.3 * jax.random.normal(KEY, (3, 2, 2))
    known = Gaussians(means, roots, jnp.asarray(task_of), jnp.ones(3, bool))
    head = Head(jnp.array([[0.5, -0.2, 0.9], [0.1, 0.4, 0.7]]), jnp.array([0.3, -0.1, 2.0]))
    task, key = jnp.int32(1), jax.random.key(3)
    drawn = [
        draw_features(shrunk(known, task), options.align_samples, jax.random.fold_in(key, i))
        for i in range(3)
    ]
    epochs = [(np.asarray(x, float), np.asarray(y)) for x, y in drawn]
    start = np.vstack([np.asarray(head.kernel, float), np.asarray(head.bias, float)])
    expected = aligned_by_hand(start, epochs, task_of, options)
    found = align_classifier(options, head, known, task, 2, key)
    assert np.abs(expected - start).max() > 0.05
    close(np.vstack([found.kernel, found.bias]), expected)

"""Random tensor graphs, shuffled orders and exact peaks by brute force, independent of ours."""

import heapq
import random

from relax_disc.analysis import Kernel, SymbolicDim, SymbolicExpr, TensorGraph


def small_graph(seed):
    """8 to 13 kernels: no outputs or two, workspaces, `after` edges, in-place pairs."""
    rng = random.Random(seed)
    style = rng.choice(["near", "any", "wide"])
    sizes = [rng.randint(0, 40) for _ in range(rng.randint(1, 3))]
    inputs, made, kernels = range(len(sizes)), [], []
    for index in range(rng.randint(8, 13)):
        choice = {"near": made[-4:], "any": made, "wide": made[:4] + made[-2:]}[style]
        count = rng.choice([0, 1, 1, 2, 2, 3])
        read = {rng.choice(choice if made and rng.random() < 0.9 else inputs) for _ in range(count)}
        written = []
        for _ in range(rng.choice([0, 1, 1, 1, 1, 2])):
            written.append(len(sizes))
            sizes.append(rng.choice([0, 1, 2, 3, 5, 8, 13, 21, rng.randint(0, 40)]))
        pairs = [
            (a, b) for a in sorted(read) for b in written if a not in inputs and rng.random() < 0.3
        ]
        for a, b in pairs:
            if rng.random() < 0.8:
                sizes[b] = sizes[a]
        after = [rng.randrange(index)] if index and rng.random() < 0.1 else []
        made += written
        workspace = rng.choice([0, 0, 0, rng.randint(0, 20)])
        kernels.append(
            Kernel(f"k{index}", tuple(read), tuple(written), tuple(pairs), tuple(after), workspace)
        )
    outputs = rng.sample(made, min(len(made), rng.randint(0, 3)))
    return TensorGraph((), tuple(sizes), tuple(inputs), tuple(outputs), tuple(kernels))


def irregular_graph(seed, count, locality=50.0):
    """Kernels that read one to three tensors from an exponentially distributed way back."""
    rng = random.Random(seed)
    sizes, made, kernels = [7, 11, 13], [], []
    for index in range(count):
        read = set()
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            back = int(rng.expovariate(1 / locality))
            read.add(made[max(0, len(made) - 1 - back)] if made else rng.randrange(3))
        written = tuple(range(len(sizes), len(sizes) + rng.choice([1, 1, 1, 2])))
        sizes += [int(rng.lognormvariate(5, 1.5)) for _ in written]
        made += written
        workspace = rng.choice([0, 0, 0, rng.randint(0, 300)])
        kernels.append(Kernel(f"k{index}", tuple(read), written, workspace_bytes=workspace))
    used = {tensor for kernel in kernels for tensor in kernel.inputs}
    outputs = tuple(t for t in made if t not in used and rng.random() < 0.1)
    return TensorGraph((), tuple(sizes), (0, 1, 2), outputs, tuple(kernels))


def training_graph(layers, dims=None):
    """A training step with all updates at the end, in place on the parameters."""
    batch, seq = dims or (SymbolicDim("batch", 1, 18), SymbolicDim("seq", 16, 1896))
    b, s = SymbolicExpr.dim(batch), SymbolicExpr.dim(seq)
    sizes, inputs, kernels = [], [], []

    def tensor(size, *, is_input=False):
        sizes.append(size)
        if is_input:
            inputs.append(len(sizes) - 1)
        return len(sizes) - 1

    def run(name, read, *made, **rest):
        tensors = tuple(tensor(size) for size in made)
        kernels.append(Kernel(name, tuple(read), tensors, **rest))
        return tensors

    hidden, wide, scores = 256 * b * s, 1024 * b * s, 16 * b * s * s
    x = tensor(hidden, is_input=True)
    saved = []
    for _ in range(layers):
        weights = [tensor(4 * 64 * 64 * k, is_input=True) for k in (1, 4)]
        (a,) = run("attention", [x, weights[0]], hidden, workspace_bytes=scores)
        (h,) = run("up", [a, weights[1]], wide)
        (g,) = run("gelu", [h], wide, inplace=((h, h + 1),))
        (d,) = run("down", [g, weights[1]], hidden)
        (y,) = run("add", [d, x], hidden, inplace=((d, d + 1),))
        saved.append((x, a, h, g, weights))
        x = y
    (grad,) = run("loss", [x], hidden)
    updates = []
    for x, a, h, g, weights in reversed(saved):
        (dg,) = run("down_grad", [grad, weights[1]], wide)
        (dw1,) = run("weight_grad", [grad, g], sizes[weights[1]])
        (dh,) = run("gelu_grad", [dg, h], wide, inplace=((dg, dg + 2),))
        (da,) = run("up_grad", [dh, weights[1]], hidden)
        dx, dw0 = run("attention_grad", [da, x, a, weights[0]], hidden, sizes[weights[0]])
        (grad,) = run("add", [dx, grad], hidden)
        updates += [(weights[1], dw1), (weights[0], dw0)]
    outputs = []
    for weight, gradient in updates:
        readers = tuple(k for k, kernel in enumerate(kernels) if weight in kernel.inputs)
        old = (weight, tensor(sizes[weight], is_input=True), tensor(sizes[weight], is_input=True))
        new = tuple(tensor(sizes[weight]) for _ in old)
        pairs = tuple(zip(old, new, strict=True))
        kernels.append(Kernel("update", (*old, gradient), new, pairs, readers, recomputable=False))
        outputs += new
    return TensorGraph((batch, seq), tuple(sizes), tuple(inputs), tuple(outputs), tuple(kernels))


def needs(graph):
    """For each kernel the set of kernels that come before it."""
    maker = {t: k for k, kernel in enumerate(graph.kernels) for t in kernel.outputs}
    return [
        {maker[t] for t in kernel.inputs if t in maker} | set(kernel.after)
        for kernel in graph.kernels
    ]


def shuffled_order(graph, seed):
    """A random valid order of a program."""
    rng = random.Random(seed)
    before = needs(graph)
    order, ready, done = [], [k for k, need in enumerate(before) if not need], set()
    readers = [[] for _ in before]
    for k, need in enumerate(before):
        for j in need:
            readers[j].append(k)
    left = [len(need) for need in before]
    while ready:
        k = ready.pop(rng.randrange(len(ready)))
        order.append(k)
        done.add(k)
        for j in readers[k]:
            left[j] -= 1
            if not left[j]:
                ready.append(j)
    return order


def shuffled(graph, seed):
    """The same program in a random valid order."""
    return graph.reordered(shuffled_order(graph, seed))


def replayed_peak(graph, order):
    """Peak of an order by a plain replay, which trusts nothing; a `must` pair's output is free."""
    sizes, inputs, keep = graph.sizes, set(graph.inputs), set(graph.outputs)
    before = needs(graph)
    overlay = set()
    for kernel in graph.kernels:
        overlay |= {b for a, b in kernel.inplace if a in inputs | overlay}
    left = {}
    for kernel in graph.kernels:
        for tensor in set(kernel.inputs):
            left[tensor] = left.get(tensor, 0) + 1
    assert sorted(order) == list(range(len(graph.kernels)))
    live, ran = {t: sizes[t] for t in inputs}, set()
    peak = sum(live.values())
    for index in order:
        assert before[index] <= ran, f"kernel {index} runs too early"
        ran.add(index)
        kernel = graph.kernels[index]
        for tensor in kernel.outputs:
            live[tensor] = 0 if tensor in overlay else sizes[tensor]
        for tensor in set(kernel.inputs):
            left[tensor] -= 1
        dying = {t for t in kernel.inputs if left[t] == 0} - keep - inputs
        saved, used = 0, set()
        for a, b in kernel.inplace:
            if a in dying and a not in overlay and sizes[a] == sizes[b] and not {a, b} & used:
                used |= {a, b}
                saved += sizes[b]
        peak = max(peak, sum(live.values()) + kernel.workspace_bytes - saved)
        for tensor in (*dying, *(t for t in kernel.outputs if not left.get(t) and t not in keep)):
            live.pop(tensor, None)
    return peak


def exact_peak(graph):
    """Least peak over all orders: a search over all sets of kernels that may have run."""
    sizes, inputs, keep = graph.sizes, set(graph.inputs), set(graph.outputs)
    count = len(graph.kernels)
    before = [sum(1 << j for j in need) for need in needs(graph)]
    maker = {t: k for k, kernel in enumerate(graph.kernels) for t in kernel.outputs}
    readers = {
        t: sum(1 << k for k, kernel in enumerate(graph.kernels) if t in kernel.inputs)
        for t in maker
    }
    resident = sum(sizes[t] for t in inputs)

    def live(done):
        return resident + sum(
            sizes[t] for t in maker if done >> maker[t] & 1 and (t in keep or readers[t] & ~done)
        )

    best, queue = {0: resident}, [(resident, 0)]
    while queue:
        peak, done = heapq.heappop(queue)
        if done == (1 << count) - 1:
            return peak
        if best[done] < peak:
            continue
        for k, kernel in enumerate(graph.kernels):
            if done >> k & 1 or before[k] & ~done:
                continue
            after, used = done | 1 << k, set()
            here = live(done) + sum(sizes[t] for t in kernel.outputs) + kernel.workspace_bytes
            for a, b in kernel.inplace:
                dies = a not in inputs | keep and not readers[a] & ~after
                if dies and sizes[a] == sizes[b] and not {a, b} & used:
                    used |= {a, b}
                    here -= sizes[b]
            value = max(peak, here)
            if value < best.get(after, value + 1):
                best[after] = value
                heapq.heappush(queue, (value, after))
    raise AssertionError("no order")

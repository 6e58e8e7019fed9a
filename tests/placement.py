"""An independent judge of arena plans: what lives at the same time must not overlap."""

from relax_disc.vm_builtins.plan_metadata import Storage, run_program


def check_placement(session, dims, budget=None):
    """No two tensors that live at the same time overlap, judged from the plan's numbers alone."""
    facts = session.plan(dims, budget)
    metadata = session.metadata
    allowed = {
        (k, source, target)
        for k, kernel in enumerate(metadata.kernels)
        for source, target in kernel.inplace
    }
    placed = []
    for version in facts.versions:
        entry = metadata.tensors[version.tensor]
        size = run_program(metadata.programs[entry.bytes], dims)
        if entry.storage is Storage.ARENA and size:
            assert version.offset % 64 == 0
            assert version.offset + size <= facts.arena_bytes
            placed.append((version, size))
    for i, (a, a_size) in enumerate(placed):
        for b, b_size in placed[i + 1 :]:
            if a.last_use < b.created or b.last_use < a.created:
                continue
            if a.offset + a_size <= b.offset or b.offset + b_size <= a.offset:
                continue
            first, second = (a, b) if a.created < b.created else (b, a)
            kernel = facts.sequence[second.created]
            assert first.last_use == second.created and first.offset == second.offset
            assert (kernel, first.tensor, second.tensor) in allowed
    return facts

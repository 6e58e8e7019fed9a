"""Measured times of kernels become their model, at the shapes measured and between them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_disc.vm_builtins.calibration import (
    Measurement,
    apply_measurements,
    fit_line,
    measured,
)
from relax_disc.vm_builtins.session import Session
from tests.relax_programs import call, compile_program
from tests.vm_builtins.test_runtime import CHAIN, run_and_compare


def test_one_shape_scales_the_model_to_what_was_measured():
    machine = compile_program(CHAIN.module())
    session = Session.of(machine)
    with pytest.raises(ValueError, match="profile"):
        measured(session)
    with session.profile():
        call(machine, CHAIN.arguments(50))
    total = sum(time for _, time in session.kernel_times())
    before = session.plan([50])
    apply_measurements(session, [measured(session)])
    assert session.plan([50]).base_time_ns == pytest.approx(total, rel=0.01)
    run_and_compare(CHAIN, machine)
    apply_measurements(session, [])
    assert session.plan([50]).base_time_ns == before.base_time_ns


def test_two_shapes_model_those_between():
    session = Session.of(compile_program(CHAIN.module()))
    count = len(session.kernel_names)

    def times(rows):
        return tuple(2000.0 + 30.0 * rows * (k + 1) for k in range(count))

    apply_measurements(session, [Measurement((rows,), times(rows)) for rows in (10, 1000)])
    for rows in (10, 400, 1000, 5000):
        assert session.plan([rows]).base_time_ns == pytest.approx(sum(times(rows)), rel=0.01)


def test_another_functions_measurement_is_refused():
    session = Session.of(compile_program(CHAIN.module()))
    with pytest.raises(ValueError, match="does not belong"):
        apply_measurements(session, [Measurement((3,), (1.0,))])


POINT = st.tuples(st.floats(0, 1e9), st.floats(1, 1e10))


@given(st.lists(POINT, min_size=1, max_size=6))
def test_lines_never_fall_below_zero(points):
    factor, fixed = fit_line(points, 3000.0)
    assert factor >= 0 and fixed >= 0 and factor + fixed > 0


@given(st.floats(1e-3, 1e3), st.floats(0, 1e6), st.lists(st.floats(1, 1e8), min_size=2, max_size=5))
def test_points_on_a_line_give_the_line(factor, fixed, works):
    if max(works) < 2 * min(works):
        works = [*works, 4 * max(works)]
    found = fit_line([(work, factor * work + fixed) for work in works], 3000.0)
    for work in works:
        time = factor * work + fixed
        assert found[0] * work + found[1] == pytest.approx(time, rel=1e-4)

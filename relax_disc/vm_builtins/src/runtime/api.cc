// Global functions of the run time: what compiled code calls, and what session.py calls.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/reflection/registry.h>

#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "offload/file_tier.h"
#include "runtime/lists.h"
#include "runtime/plan_numbers.h"
#include "runtime/session.h"

namespace relax_disc {

namespace ffi = tvm::ffi;

namespace {

/*! \brief The sessions of one virtual machine: a module that it imports, so that both end together. */
class SessionTable : public ffi::ModuleObj {
 public:
  const char* kind() const final { return "relax_disc.sessions"; }
  ffi::Optional<ffi::Function> GetFunction(const ffi::String&) final { return std::nullopt; }

  SessionPtr Open(const ffi::String& metadata) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [text, session] : sessions_) {
      if (text.data() == metadata.data()) return session;
    }
    SessionPtr session = ffi::make_object<Session>(metadata);
    sessions_.emplace_back(metadata, session);  // the text stays, so its address names it
    return session;
  }

 private:
  std::mutex mutex_;
  std::vector<std::pair<ffi::String, SessionPtr>> sessions_;
};

SessionTable* TableOf(void* context) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  // TVM hands its virtual machine, a module, to builtins as a bare pointer.
  auto* machine = static_cast<ffi::ModuleObj*>(context);
  for (const ffi::Any& import : machine->imports()) {
    ffi::Module module = import.cast<ffi::Module>();
    if (std::string(module->kind()) == "relax_disc.sessions") {
      return static_cast<SessionTable*>(const_cast<ffi::ModuleObj*>(module.operator->()));
    }
  }
  ffi::ObjectPtr<SessionTable> table = ffi::make_object<SessionTable>();
  SessionTable* result = table.get();
  machine->ImportModule(ffi::Module(std::move(table)));
  return result;
}

Session* SessionOf(const ffi::ObjectRef& object) {
  const Session* session = object.as<Session>();
  if (session == nullptr) TVM_FFI_THROW(TypeError) << "expected a relax_disc.Session";
  return const_cast<Session*>(session);
}

Frame* FrameOf(const ffi::ObjectRef& object) {
  const Frame* frame = object.as<Frame>();
  if (frame == nullptr) TVM_FFI_THROW(TypeError) << "expected a relax_disc.Frame";
  return const_cast<Frame*>(frame);
}

std::vector<int64_t> Values(const ffi::Shape& shape) { return {shape.begin(), shape.end()}; }

Facts PlanFacts(const ffi::ObjectRef& object, const ffi::Shape& dims, int64_t budget_bytes) {
  Session* session = SessionOf(object);
  bool hit = false;
  PlanPtr plan = session->PlanFor(Values(dims), budget_bytes, &hit);
  const ArenaPlan& arena = plan->arena;
  return Facts{{"feasible", plan->feasible},
               {"peak_bytes", plan->feasible ? plan->peak_bytes() : plan->least_bytes()},
               {"arena_bytes", arena.arena_bytes},
               {"live_peak_bytes", arena.live_peak_bytes},
               {"resident_bytes", plan->resident_bytes},
               {"escaping_bytes", plan->escaping_bytes},
               {"workspace_bytes", plan->workspace_bytes},
               {"library_bytes", plan->library_bytes},
               {"least_bytes", plan->least_bytes()},
               {"lower_bound_bytes", plan->outside_bytes() + arena.lower_bound_bytes},
               {"time_ns", plan->time_ns()},
               {"base_time_ns", plan->base_time_ns},
               {"planning_ns", plan->planning_ns},
               {"cache_hit", hit},
               {"sequence", Numbers(arena.sequence)},
               {"versions", VersionNumbers(arena)},
               {"transfers", TransferNumbers(arena)},
               {"tier_bytes", arena.tier_bytes},
               {"stall_ns", plan->stall_ns()},
               {"offloaded_state_bytes", plan->state.file_bytes},
               {"state_window_bytes", plan->state.peak_bytes},
               {"buffer_bytes", plan->buffer_bytes},
               {"offloaded_bytes", plan->TransferredBytes(session->metadata(), false)},
               {"reloaded_bytes", plan->TransferredBytes(session->metadata(), true)}};
}

bool Fits(const ffi::ObjectRef& object, const ffi::Shape& dims, int64_t budget_bytes) {
  return SessionOf(object)->PlanFor(Values(dims), budget_bytes, nullptr, false)->feasible;
}

Facts LastReport(const ffi::ObjectRef& object) {
  Report report = SessionOf(object)->last_report();
  return Facts{{"dims", ffi::Shape(report.dims)},
               {"budget_bytes", report.budget_bytes},
               {"planned_peak_bytes", report.planned_peak_bytes},
               {"peak_bytes", report.peak_bytes},
               {"arena_bytes", report.arena_bytes},
               {"resident_bytes", report.resident_bytes},
               {"escaping_bytes", report.escaping_bytes},
               {"workspace_bytes", report.workspace_bytes},
               {"held_bytes", report.held_bytes},
               {"recomputations", report.recomputations},
               {"offloaded_bytes", report.offloaded_bytes},
               {"reloaded_bytes", report.reloaded_bytes},
               {"waited_ns", report.waited_ns},
               {"offloaded_state_bytes", report.offloaded_state_bytes},
               {"state_window_bytes", report.state_window_bytes},
               {"planning_ns", report.planning_ns},
               {"entry_ns", report.entry_ns},
               {"time_ns", report.time_ns},
               {"cache_hit", report.cache_hit},
               {"finished", report.finished}};
}

Facts CounterFacts(const ffi::ObjectRef& object) {
  Session* session = SessionOf(object);
  Counters counters = session->counters();
  return Facts{{"calls", counters.calls},
               {"hits", counters.hits},
               {"misses", counters.misses},
               {"failures", counters.failures},
               {"recomputations", counters.recomputations},
               {"evicted_plans", counters.evicted_plans},
               {"plans", session->plan_count()},
               {"held_bytes", session->held_bytes()}};
}

ffi::Array<ffi::Shape> Profile(const ffi::ObjectRef& object) {
  auto [runs, times] = SessionOf(object)->profile();
  return {ffi::Shape(runs), ffi::Shape(times)};
}

void Enter(ffi::PackedArgs args, ffi::Any* result) {
  ffi::Shape dims = args[1].cast<ffi::Shape>();
  std::vector<ffi::Tensor> given;
  given.reserve(args.size() - 2);
  for (int32_t i = 2; i < args.size(); ++i) {
    std::optional<ffi::Tensor> tensor = args[i].as<ffi::Tensor>();
    given.push_back(tensor ? *tensor : ffi::Tensor());  // a number where it is supplied later
  }
  try {
    *result = ffi::ObjectRef(SessionOf(args[0].cast<ffi::ObjectRef>())
                                 ->Enter(Values(dims), std::move(given)));
  } catch (const std::bad_alloc&) {
    TVM_FFI_THROW(OutOfMemoryError) << "the system has no memory to plan the call; nothing has run";
  }
}

void SetMachine(const ffi::ObjectRef& session, double flops_per_ns, double bytes_per_ns,
                double overhead_ns) {
  SessionOf(session)->SetCostModel(0, CostModel({64, flops_per_ns, bytes_per_ns, overhead_ns}));
}

void SetKernelTimes(const ffi::ObjectRef& session, int64_t threads,
                    const ffi::Array<double>& factors, const ffi::Array<double>& fixed_ns) {
  CostModel cost = SessionOf(session)->default_cost();
  cost.factors.assign(factors.begin(), factors.end());
  cost.fixed_ns.assign(fixed_ns.begin(), fixed_ns.end());
  SessionOf(session)->SetCostModel(static_cast<int>(threads), std::move(cost));
}

Facts KernelWork(const ffi::ObjectRef& session, const ffi::Shape& dims) {
  const std::vector<double> work = SessionOf(session)->Work(Values(dims));
  return Facts{{"work_ns", ffi::Array<double>(work.begin(), work.end())},
               {"overhead_ns", SessionOf(session)->default_cost().overhead_ns}};
}

/*! \brief As planner.py takes it. */
List GraphLists(const ffi::ObjectRef& session, const ffi::Shape& dims) {
  const auto list = [](const auto& values) {
    List result;
    for (const auto value : values) result.push_back(static_cast<int64_t>(value));
    return result;
  };
  const PlannerGraph graph = SessionOf(session)->GraphFor(Values(dims));
  List ops;
  for (const PlannerOp& op : graph.ops) {
    List pairs;
    for (const auto& [input, output] : op.inplace) pairs.push_back(list(std::vector{input, output}));
    ops.push_back(List{op.time_ns, op.rerun_ns, op.workspace, op.recomputable, list(op.inputs),
                       list(op.outputs), pairs});
  }
  return {list(graph.bytes), list(graph.resident), list(graph.is_output), ops};
}

TierPtr TierOf(const ffi::Any& value) {
  if (value == nullptr) return nullptr;
  const ffi::ObjectRef object = value.cast<ffi::ObjectRef>();
  const Tier* tier = object.as<Tier>();
  if (tier == nullptr) TVM_FFI_THROW(TypeError) << "expected a relax_disc.Tier";
  return ffi::details::ObjectUnsafe::ObjectPtrFromUnowned<Tier>(const_cast<Tier*>(tier));
}

StateFilePtr StateFileOf(const ffi::Any& value) {
  if (value == nullptr) return nullptr;
  const ffi::ObjectRef object = value.cast<ffi::ObjectRef>();
  const StateFile* file = object.as<StateFile>();
  if (file == nullptr) TVM_FFI_THROW(TypeError) << "expected a relax_disc.StateFile";
  return ffi::details::ObjectUnsafe::ObjectPtrFromUnowned<StateFile>(const_cast<StateFile*>(file));
}

void PutStateAway(const ffi::Any& file, int64_t address, int64_t bytes) {
  StateCall call;
  StateFilePtr state = StateFileOf(file);
  state->Wait(&call, state->PutAway(&call, reinterpret_cast<char*>(address), bytes));
}

Facts TierFacts(const ffi::Any& object) {
  const TierModel figures = TierOf(object)->Figures();
  return Facts{{"write_bytes_per_s", figures.write_bytes_per_ns * 1e9},
               {"read_bytes_per_s", figures.read_bytes_per_ns * 1e9},
               {"latency_ns", figures.latency_ns},
               {"buffer_bytes", figures.buffer_bytes}};
}

ffi::Tensor Reserve(const ffi::Shape& shape, DLDataType dtype) {
  const int64_t bytes = static_cast<int64_t>(ffi::GetDataSize(shape.Product(), dtype));
  BlockPtr block = MemoryBlock::Allocate({kDLCPU, 0}, bytes, Backing::kReserved);
  return ViewOfBlock(block, 0, Values(shape), dtype);
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  refl::ObjectDef<Session>(refl::init(false));
  refl::ObjectDef<Frame>(refl::init(false));
  refl::ObjectDef<Tier>(refl::init(false));
  refl::ObjectDef<FileTier>(refl::init(false));
  refl::ObjectDef<StateFile>(refl::init(false));
  using Object = ffi::ObjectRef;
  refl::GlobalDef()
      .def("relax_disc.open",
           [](void* context, ffi::String metadata) {
             return Object(TableOf(context)->Open(metadata));
           })
      .def("relax_disc.plan_only",
           [](ffi::String metadata) { return Object(ffi::make_object<Session>(metadata)); })
      .def("relax_disc.kernel_time_ns",
           [](int64_t flops, int64_t moved_bytes) {
             return CostModel().Time(0, flops, moved_bytes);
           })
      .def_packed("relax_disc.enter", Enter)
      .def("relax_disc.kernel", [](const Object& frame, int64_t k,
                                   const ffi::Function& f) { FrameOf(frame)->Kernel(k, f); })
      .def("relax_disc.regenerate_before",
           [](const Object& frame, int64_t k) { FrameOf(frame)->Regenerate(k); })
      .def("relax_disc.output",
           [](const Object& frame, int64_t i) { return FrameOf(frame)->Output(i); })
      .def("relax_disc.pause", [](const Object& frame) { FrameOf(frame)->Pause(); })
      .def("relax_disc.supply", [](const Object& frame, int64_t i,
                                   const ffi::Tensor& tensor) { FrameOf(frame)->Supply(i, tensor); })
      .def("relax_disc.leave", [](const Object& frame) { FrameOf(frame)->Leave(); })
      .def("relax_disc.copy", [](ffi::Tensor from, ffi::Tensor to) { CopyBytes(from, to); })
      .def("relax_disc.session.metadata",
           [](const Object& s) { return SessionOf(s)->text(); })
      .def("relax_disc.session.values",
           [](const Object& s, const ffi::Shape& dims) {
             return ffi::Shape(SessionOf(s)->metadata().Evaluate(Values(dims)));
           })
      .def("relax_disc.session.plan", PlanFacts)
      .def("relax_disc.session.fits", Fits)
      .def("relax_disc.session.report", LastReport)
      .def("relax_disc.session.counters", CounterFacts)
      .def("relax_disc.session.arena",
           [](const Object& s) { return ffi::Shape(SessionOf(s)->arena()); })
      .def("relax_disc.session.profile", Profile)
      .def("relax_disc.session.budget", [](const Object& s) { return SessionOf(s)->budget_bytes(); })
      .def("relax_disc.session.set_budget",
           [](const Object& s, int64_t bytes) { SessionOf(s)->SetBudget(bytes); })
      .def("relax_disc.session.set_tier",
           [](const Object& s, const ffi::Any& tier) { SessionOf(s)->SetTier(TierOf(tier)); })
      .def("relax_disc.session.set_offer",
           [](const Object& s, ffi::String offer) { SessionOf(s)->SetOffer(std::string(offer)); })
      .def("relax_disc.session.set_state",
           [](const Object& s, const ffi::Any& file, const ffi::Any& tier, const ffi::Shape& given) {
             SessionOf(s)->SetState(StateFileOf(file), TierOf(tier), Values(given));
           })
      .def("relax_disc.state_file",
           [](ffi::String folder) {
             return Object(ffi::make_object<StateFile>(std::string(folder)));
           })
      .def("relax_disc.state_file_allocate",
           [](const ffi::Any& file, int64_t bytes) {
             return reinterpret_cast<int64_t>(StateFileOf(file)->Allocate(bytes));
           })
      .def("relax_disc.state_file_free",
           [](const ffi::Any& file, int64_t address) {
             StateFileOf(file)->Free(reinterpret_cast<char*>(address));
           })
      .def("relax_disc.state_file_holds",
           [](const ffi::Any& file, int64_t address, int64_t bytes) {
             return StateFileOf(file)->Holds(reinterpret_cast<const void*>(address), bytes);
           })
      .def("relax_disc.state_file_forget",
           [](const ffi::Any& file, int64_t address) {
             StateFileOf(file)->Forget(reinterpret_cast<char*>(address));
           })
      .def("relax_disc.state_file_put_away", PutStateAway)
      .def("relax_disc.file_tier",
           [](ffi::String folder, double bytes_per_s, bool paced, bool recompute) {
             return Object(ffi::make_object<FileTier>(
                 TierOptions{std::string(folder), bytes_per_s, paced, recompute}));
           })
      .def("relax_disc.tier_figures", TierFacts)
      .def("relax_disc.fail_transfer",
           [](int64_t countdown, ffi::String how) { FailTransfer(countdown, std::string(how)); })
      .def("relax_disc.session.set_mode",
           [](const Object& s, int64_t mode) { SessionOf(s)->SetMode(static_cast<Mode>(mode)); })
      .def("relax_disc.session.set_machine", SetMachine)
      .def("relax_disc.session.set_kernel_times", SetKernelTimes)
      .def("relax_disc.session.kernel_work", KernelWork)
      .def("relax_disc.session.graph", GraphLists)
      .def("relax_disc.session.set_plan_limit",
           [](const Object& s, int64_t plans) { SessionOf(s)->SetPlanLimit(plans); })
      .def("relax_disc.session.fill_memory",
           [](const Object& s, int64_t byte) {
             SessionOf(s)->FillMemory(static_cast<uint8_t>(byte));
           })
      .def("relax_disc.session.release", [](const Object& s) { SessionOf(s)->Release(); })
      .def("relax_disc.session.share_arena",
           [](const Object& s, const Object& other) {
             SessionOf(s)->ShareArena(SessionOf(other));
           })
      .def("relax_disc.session.check_budget",
           [](const Object& s, const ffi::Shape& dims) { SessionOf(s)->CheckBudget(Values(dims)); })
      .def("relax_disc.session.torn", [](const Object& s) { return SessionOf(s)->torn(); })
      .def("relax_disc.session.clear_torn", [](const Object& s) { SessionOf(s)->clear_torn(); })
      .def("relax_disc.reserve", Reserve)
      .def("relax_disc.allocated_bytes", AllocatedBytes)
      .def("relax_disc.fail_allocation", FailAllocation);
}

}  // namespace relax_disc

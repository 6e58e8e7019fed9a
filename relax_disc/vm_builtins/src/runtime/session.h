/*!
 * \file session.h
 * \brief State of one compiled function in one virtual machine, and one call of it.
 *
 * A Session owns the plans and the counters, and an arena that it may share with other sessions; a
 * Frame is one call.  The first call to arrive takes the arena, a call that arrives meanwhile
 * (another thread, or a kernel that calls back) gets an arena of its own for its duration.
 */
#ifndef RELAX_DISC_VM_BUILTINS_RUNTIME_SESSION_H_
#define RELAX_DISC_VM_BUILTINS_RUNTIME_SESSION_H_

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/object.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "offload/state_file.h"
#include "offload/tier.h"
#include "runtime/arena.h"
#include "runtime/binding.h"
#include "runtime/memory.h"
#include "runtime/metadata.h"
#include "runtime/plan.h"

namespace relax_disc {

/*! \brief What a call did; `peak_bytes` is counted while it runs, not taken from the plan. */
struct Report {
  std::vector<int64_t> dims;
  int64_t budget_bytes = -1;
  int64_t planned_peak_bytes = 0, peak_bytes = 0, arena_bytes = 0, resident_bytes = 0;
  int64_t escaping_bytes = 0, workspace_bytes = 0, held_bytes = 0, recomputations = 0;
  int64_t offloaded_bytes = 0, reloaded_bytes = 0, waited_ns = 0;
  int64_t offloaded_state_bytes = 0, state_window_bytes = 0;
  int64_t planning_ns = 0, entry_ns = 0, time_ns = 0;
  bool cache_hit = false, finished = false;
};

struct Counters {
  int64_t calls = 0, hits = 0, misses = 0, failures = 0, recomputations = 0, evicted_plans = 0;
};

enum class Mode : int32_t { kRun = 0, kDryRun = 1, kProfile = 2 };

class Frame;

class Session : public tvm::ffi::Object {
 public:
  explicit Session(const tvm::ffi::String& metadata) : text_(metadata), metadata_(Metadata::Parse(metadata)) {
    functions_.resize(metadata_.kernels.size());
    kernel_ns_.assign(metadata_.kernels.size(), 0);
    kernel_runs_.assign(metadata_.kernels.size(), 0);
    // A plan takes some 20 bytes a kernel and tensor; a few MB in all.
    const size_t kernels = std::max<size_t>(metadata_.kernels.size(), 1);
    plan_limit_ = std::min<size_t>(256, std::max<size_t>(32, 100000 / kernels));
  }

  /*! \brief Begin a call: plan, check the budget, bind memory.  Nothing has run when it throws. */
  tvm::ffi::ObjectPtr<Frame> Enter(const std::vector<int64_t>& dims,
                                   std::vector<tvm::ffi::Tensor> given);

  /*!
   * \brief The plan of a shape under a budget (negative: none) for the caller's threads.
   * \param needs_least See MakePlan.
   */
  PlanPtr PlanFor(const std::vector<int64_t>& dims, int64_t budget_bytes, bool* hit = nullptr,
                  bool needs_least = true);

  /*! \brief Throw what a call at this shape would throw for its budget. */
  void CheckBudget(const std::vector<int64_t>& dims);

  /*! \brief From now on use the arena of another session; the own one is given back. */
  void ShareArena(Session* other);

  void SetBudget(int64_t bytes);
  /*! \brief Where calls may keep tensors meanwhile; null: nowhere.  Drops all plans. */
  void SetTier(TierPtr tier);
  /*! \brief What the owner can do besides when a budget does not hold, for the refusal. */
  void SetOffer(std::string offer);
  /*!
   * \brief Say which given tensors lie in a file; null: none.  Drops all plans.
   * \param tier Whose speeds plans go by.
   */
  void SetState(StateFilePtr file, TierPtr tier, const std::vector<int64_t>& given);
  void SetMode(Mode mode);
  /*! \brief Model times on so many threads; 0: on any number, in place of all models so far. */
  void SetCostModel(int threads, CostModel cost);
  /*! \brief The model for numbers of threads that have none of their own. */
  CostModel default_cost() const { return costs_.at(0); }
  /*! \brief The program as the planner sees it at a shape. */
  PlannerGraph GraphFor(const std::vector<int64_t>& dims) const;
  /*! \brief Per kernel: modelled nanoseconds at a shape, without what calibration knows. */
  std::vector<double> Work(const std::vector<int64_t>& dims) const;
  void SetPlanLimit(int64_t plans);
  /*! \brief Set every byte between calls, for tests. */
  void FillMemory(uint8_t byte) { arena_->Fill(byte); }
  /*! \brief Give the arena and all plans back. */
  void Release();

  const Metadata& metadata() const { return metadata_; }
  const tvm::ffi::String& text() const { return text_; }
  Report last_report() const;
  Counters counters() const;
  int64_t budget_bytes() const { return budget_bytes_; }
  int64_t held_bytes() const;
  /*! \brief Address and size of what is held between calls. */
  std::vector<int64_t> arena() const;
  bool torn() const { return torn_; }
  void clear_torn() { torn_ = false; }
  int64_t plan_count() const;
  /*! \brief Per kernel: executions and their total time, since profiling began. */
  std::pair<std::vector<int64_t>, std::vector<int64_t>> profile() const;

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("relax_disc.Session", Session, tvm::ffi::Object);

 private:
  friend class Frame;
  using Key = std::tuple<std::vector<int64_t>, int64_t, int>;  // dims, budget, threads
  struct Cached {
    PlanPtr plan;
    std::list<Key>::iterator use;
  };

  [[noreturn]] void RefuseBudget(const Plan& plan) const;
  const CostModel& CostFor(int threads) const;  // mutex held
  PlanPtr Lookup(const std::vector<int64_t>& dims, int64_t budget_bytes, bool* hit,
                 bool needs_least = true);                                            // mutex held
  void TakeArena(Frame* frame);                                                       // mutex held
  void DropPlans();                                                                   // mutex held
  std::unique_ptr<Binding> TakeBinding(const PlanPtr& plan, const BlockPtr& arena);
  void Return(Frame* frame);

  const tvm::ffi::String text_;
  const Metadata metadata_;
  mutable std::mutex mutex_;
  std::map<Key, Cached> plans_;
  std::list<Key> recent_;  // most recently used first
  std::list<std::unique_ptr<Binding>> bindings_;  // that no call has, last used first
  size_t plan_limit_ = 256;
  std::shared_ptr<SharedArena> arena_ = std::make_shared<SharedArena>();
  DLDevice device_{kDLCPU, 0};
  std::map<int, CostModel> costs_{{0, CostModel(metadata_.machine)}};  // by threads; 0: any other
  int64_t budget_bytes_ = -1;
  TierPtr tier_, state_tier_;
  std::string offer_;
  StateFilePtr state_file_;
  std::vector<char> in_file_;  // by index of the given tensor
  Mode mode_ = Mode::kRun;
  bool torn_ = false;
  Report last_;
  Counters counters_;
  std::vector<tvm::ffi::Function> functions_;  // of kernels, as calls have passed them
  std::vector<int64_t> kernel_ns_, kernel_runs_;
};

using SessionPtr = tvm::ffi::ObjectPtr<Session>;

/*! \brief One call; dropping it unfinished (a kernel raised) gives everything back. */
class Frame : public tvm::ffi::Object {
 public:
  ~Frame();

  /*! \brief Run kernel k, which is next in the plan. */
  void Kernel(int64_t k, const tvm::ffi::Function& function);
  /*! \brief Run the recomputations that the plan lists before kernel k. */
  void Regenerate(int64_t k);
  /*! \brief The i-th tensor of the flat result. */
  tvm::ffi::Tensor Output(int64_t i) const;
  /*! \brief The first half is done; what is given late may come, or the frame be dropped. */
  void Pause() { paused_ = true; }
  /*! \brief Give the i-th tensor, which was not there when the call began. */
  void Supply(int64_t i, const tvm::ffi::Tensor& tensor);
  /*! \brief Finish: every kernel has run. */
  void Leave();

  static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("relax_disc.Frame", Frame, tvm::ffi::Object);

 private:
  friend class Session;
  void Bind();
  bool IsInFile(size_t given) const;
  const Binding& Bound() const;
  void Execute(const Step& step, const Step& next);
  void Count(int32_t dim, int64_t count);
  void CheckCounts(int32_t dim) const;
  bool PlanRest();
  /*! \brief Of the metadata's programs, for the sizes as far as they are known. */
  const std::vector<int64_t>& Values() const { return counted_.empty() ? plan_->values : counted_; }
  void Call(const Step& step, const Step& next);
  void BeginTransfers();
  void Request(int32_t position, bool is_read);
  void WaitFor(int32_t position);
  void MoveBefore(int32_t position);
  void MoveState(int32_t position);

  SessionPtr session_;
  PlanPtr plan_;
  Mode mode_ = Mode::kRun;
  BlockPtr arena_;
  std::shared_ptr<SharedArena> taken_from_;  // null: memory of the call's own
  bool finished_ = false, paused_ = false, wrote_given_ = false;
  std::unique_ptr<Binding> binding_;
  std::vector<std::unique_ptr<Binding>> earlier_;  // in use before the rest was planned anew
  TierPtr tier_;
  std::unique_ptr<TierCall> transfers_;  // null where the plan has none
  StateFilePtr state_file_;
  std::unique_ptr<StateMover> state_;    // null where no state lies in a file
  std::vector<int64_t> requests_;        // numbers of those made, in the plan's order
  std::vector<int32_t> waits_;           // transfers by the position that they must be done before
  size_t next_wait_ = 0;
  std::vector<tvm::ffi::Tensor> given_, escaping_;
  std::vector<int64_t> dims_, counted_;  // counted_: values, once a dim has been counted
  std::vector<char> is_known_;           // of each dim, once one has been counted
  int32_t position_ = 0;
  int64_t arena_peak_ = 0, escaping_bytes_ = 0, resident_bytes_ = 0, replanning_ns_ = 0;
  Report report_;
  std::chrono::steady_clock::time_point start_;
};

}  // namespace relax_disc
#endif  // RELAX_DISC_VM_BUILTINS_RUNTIME_SESSION_H_

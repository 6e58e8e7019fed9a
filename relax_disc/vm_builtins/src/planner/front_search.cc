#include "planner/front_search.h"

#include <algorithm>

namespace relax_disc {

namespace {

// Choices that are looked at for one whose plan is below a rung as it is.
constexpr std::size_t kLooks = 12;

}  // namespace

FrontSearch::FrontSearch(const Model& model, int effort, int64_t limit)
    : search(model, kGrace),
      model_(model),
      base_peak_(search.timeline.Peak()),
      front_(model, search.timeline),
      limit_(limit),
      choice_(front_.Find(limit)),
      bound_(front_.exact() && choice_ < front_.choices().size() ? Time(choice_) : 0) {
  for (const ChainStyle& style : FrontStyles(effort)) {
    ladders_.push_back({style, style.divisions + 1, 0, 0});
    Lower(&ladders_.back());
  }
}

int64_t FrontSearch::Time(std::size_t choice) const {
  return choice < front_.choices().size() ? front_.choices()[choice].time : INT64_MAX;
}

// Go to the next rung within the limit.
void FrontSearch::Lower(Ladder* ladder) const {
  do {
    --ladder->rung;
    ladder->limit = RungLimit(model_, base_peak_, ladder->style.divisions, ladder->rung);
  } while (ladder->limit > limit_);
  ladder->choice = ladder->rung > 0 ? front_.Find(ladder->limit) : front_.choices().size();
}

int64_t FrontSearch::NextTime() const {
  int64_t time = Time(choice_);
  for (const Ladder& ladder : ladders_) time = std::min(time, Time(ladder.choice));
  return time;
}

void FrontSearch::Next() {
  const int64_t time = NextTime();
  if (Time(choice_) == time) {
    ShowChoice(choice_++);
    return;
  }
  for (Ladder& ladder : ladders_) {
    if (Time(ladder.choice) != time) continue;
    ShowRung(ladder);
    Lower(&ladder);
    return;
  }
}

void FrontSearch::ShowRest() {
  for (const Ladder& last : ladders_) {
    Ladder ladder = last;
    for (ladder.rung = ladder.style.divisions; ladder.rung > 0; --ladder.rung) {
      ladder.limit = RungLimit(model_, base_peak_, ladder.style.divisions, ladder.rung);
      ladder.choice = front_.Find(ladder.limit);
      if (ladder.limit <= limit_ || ladder.choice == front_.choices().size()) break;
      ShowRung(ladder);
    }
  }
  for (std::size_t choice = front_.choices().size(); choice-- > 0;) ShowChoice(choice);
}

// Make the plan of a choice; false where it runs a kernel whose input was overwritten, or is faster
// than the choice, which would break the order of the search.
bool FrontSearch::Take(std::size_t choice) {
  search.timeline.Assign(front_.Windows(front_.choices()[choice], kGrace));
  return search.timeline.valid() && search.timeline.time() >= Time(choice);
}

void FrontSearch::ShowChoice(std::size_t choice) {
  shown_limit_ = front_.choices()[choice].limit;
  if (Take(choice)) found();
}

void FrontSearch::ShowRung(const Ladder& ladder) {
  const SearchStyle& style = ladder.style.search;
  const int64_t floor = Time(ladder.choice);
  shown_limit_ = ladder.limit;
  shows_rung_ = true;
  if (Take(ladder.choice) && search.Shrink(ladder.limit, floor, style)) {
    search.Relax(ladder.limit, floor, style.thorough);
    found();
  }
  const std::size_t end = std::min(ladder.choice + kLooks, front_.choices().size());
  for (std::size_t choice = ladder.choice + 1; choice < end; ++choice) {
    if (!Take(choice) || search.timeline.Peak() > ladder.limit) continue;
    search.Relax(ladder.limit, floor, style.thorough);
    found();
    break;
  }
  shows_rung_ = false;
}

}  // namespace relax_disc

// Which signs a polynomial takes over a box of integers: branch and bound with exact bounds.
//
// On a box a polynomial is a weighted mean of its control values (its Bernstein coefficients), with
// weights that are never negative: they enclose it, and those at the corners are its values there.
// If none is negative the polynomial is 0 at most on faces where a corner is 0.  On a side without
// upper limit the control values are the coefficients after a shift of the dim to its lower end, for
// which the same holds.  A box whose control values have one sign is settled; one in which the
// polynomial is monotone along a dim shrinks to the face that holds what is still looked for; any
// other is cut in two at integers, until every side has at most two and the corners tell all.
//
// Control values times the binomial coefficients are integers.  A box in which they could exceed 128
// bits is only cut.
//
// Reference: J. Garloff, "The Bernstein algorithm", Interval Computations 2, 1993.
#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/reflection/registry.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <queue>
#include <vector>

namespace relax_disc {
namespace {

namespace ffi = tvm::ffi;
__extension__ typedef __int128 Wide;

enum Sign : int { kNegative = 1, kZero = 2, kPositive = 4, kBoth = 5, kAll = 7 };

constexpr int64_t kNoLimit = -1;
constexpr int64_t kFarthest = int64_t{1} << 40;  // boxes without limit are not cut beyond

int64_t Choose(int n, int k) {
  int64_t result = 1;
  for (int i = 0; i < k; ++i) result = result * (n - i) / (i + 1);
  return result;
}

// What makes the control values of one dim integers.
int64_t ScaleOf(int degree) {
  int64_t scale = 1;
  for (int k = 0; k <= degree; ++k) scale = std::lcm(scale, Choose(degree, k));
  return scale;
}

struct Side {
  int64_t lower, upper, step;  // upper is kNoLimit where there is none
  int degree;
};

struct Box {
  std::vector<int64_t> lower, upper;
  double score;  // the least first
  int64_t number;
  int open;  // signs that it may hold

  bool operator<(const Box& other) const {
    return score != other.score ? score > other.score : number > other.number;
  }
};

class SignSearch {
 public:
  SignSearch(std::vector<int64_t> coefficients, std::vector<Side> sides)
      : coefficients_(std::move(coefficients)), sides_(std::move(sides)) {}

  void Run(int64_t limit) {
    Box whole{{}, {}, 0.0, 0, kAll};
    for (const Side& side : sides_) {
      whole.lower.push_back(side.lower);
      whole.upper.push_back(side.upper);
    }
    boxes_.push(std::move(whole));
    for (; !boxes_.empty() && limit > 0 && (found_ & kBoth) != kBoth; --limit) {
      const Box box = boxes_.top();
      boxes_.pop();
      const double most = Magnitude(box);
      if (most < std::ldexp(1.0, 62)) {
        Bound<int64_t>(box);
      } else if (most < std::ldexp(1.0, 126)) {
        Bound<Wide>(box);
      } else {
        Cut(box, std::vector<double>(sides_.size(), 1.0));
      }
    }
    int left = given_up_;
    for (; !boxes_.empty(); boxes_.pop()) left |= boxes_.top().open;
    possible_ = found_ | left;
  }

  // Found and possible signs; of each found one, the smallest first, a point.
  ffi::Shape Result() const {
    std::vector<int64_t> result{found_, possible_};
    for (int sign : {kNegative, kZero, kPositive}) {
      if (found_ & sign) result.insert(result.end(), points_[sign].begin(), points_[sign].end());
    }
    return ffi::Shape(result);
  }

 private:
  bool IsRay(const Box& box, size_t axis) const { return box.upper[axis] == kNoLimit; }

  // A number that no control value, nor a step of its computation, exceeds.
  double Magnitude(const Box& box) const {
    std::vector<double> sizes(1, 1.0);
    double scale = 1.0;
    for (size_t axis = 0; axis < sides_.size(); ++axis) {
      const int degree = sides_[axis].degree;
      const double top = IsRay(box, axis) ? box.lower[axis] + 1.0 : double(box.upper[axis]);
      std::vector<double> next;
      for (double size : sizes) {
        for (int k = 0; k <= degree; ++k) next.push_back(size * std::pow(top, k));
      }
      sizes = std::move(next);
      scale *= double(ScaleOf(degree)) * (degree + 1);
    }
    double sum = 0;
    for (size_t i = 0; i < sizes.size(); ++i) sum += std::abs(double(coefficients_[i])) * sizes[i];
    return sum * scale;
  }

  // The map from the coefficients of one dim to its control values.
  template <typename T>
  std::vector<T> Matrix(const Box& box, size_t axis) const {
    const int n = sides_[axis].degree;
    std::vector<T> low(n + 1, 1), high(n + 1, 1), matrix((n + 1) * (n + 1), 0);
    for (int k = 1; k <= n; ++k) {
      low[k] = low[k - 1] * box.lower[axis];
      high[k] = IsRay(box, axis) ? 0 : high[k - 1] * box.upper[axis];
    }
    const int64_t scale = ScaleOf(n);
    for (int i = 0; i <= n; ++i) {
      for (int k = 0; k <= n; ++k) {
        T& entry = matrix[i * (n + 1) + k];
        if (IsRay(box, axis)) {
          if (i <= k) entry = Choose(k, i) * low[k - i];
          continue;
        }
        // The blossom of x**k at n - i times the lower and i times the upper end.
        for (int j = std::max(0, k - n + i); j <= std::min(i, k); ++j) {
          entry += Choose(i, j) * Choose(n - i, k - j) * high[j] * low[k - j];
        }
        entry *= scale / Choose(n, k);
      }
    }
    return matrix;
  }

  template <typename T>
  std::vector<T> ControlValues(const Box& box) const {
    std::vector<T> values(coefficients_.begin(), coefficients_.end()), next(values.size());
    for (size_t axis = 0; axis < sides_.size(); ++axis) {
      // The first dim goes last, so that after all of them the order is the old one.
      const std::vector<T> matrix = Matrix<T>(box, axis);
      const size_t count = sides_[axis].degree + 1, others = values.size() / count;
      for (size_t other = 0; other < others; ++other) {
        for (size_t i = 0; i < count; ++i) {
          T sum = 0;
          for (size_t k = 0; k < count; ++k) sum += matrix[i * count + k] * values[k * others + other];
          next[other * count + i] = sum;
        }
      }
      std::swap(values, next);
    }
    return values;
  }

  template <typename T>
  void NoteCorners(const Box& box, const std::vector<T>& values) {
    for (uint32_t corner = 0; corner < (1u << sides_.size()); ++corner) {
      size_t at = 0;
      bool exists = true;
      for (size_t axis = 0; axis < sides_.size(); ++axis) {
        const bool high = corner >> axis & 1;
        exists = exists && !(high && IsRay(box, axis));
        at = at * (sides_[axis].degree + 1) + (high ? sides_[axis].degree : 0);
      }
      if (!exists) continue;
      const int sign = values[at] > 0 ? kPositive : values[at] < 0 ? kNegative : kZero;
      if (found_ & sign) continue;
      found_ |= sign;
      for (size_t axis = 0; axis < sides_.size(); ++axis) {
        points_[sign].push_back(corner >> axis & 1 ? box.upper[axis] : box.lower[axis]);
      }
    }
  }

  template <typename T>
  void Bound(const Box& box) {
    const std::vector<T> values = ControlValues<T>(box);
    NoteCorners(box, values);
    const T least = *std::min_element(values.begin(), values.end());
    const T most = *std::max_element(values.begin(), values.end());
    int open = (least < 0 ? kNegative : 0) | (most > 0 ? kPositive : 0);
    if (open == kBoth) open |= kZero;
    bool leaf = true;
    for (size_t axis = 0; axis < sides_.size(); ++axis) {
      leaf = leaf && !IsRay(box, axis) &&
             box.upper[axis] - box.lower[axis] <= sides_[axis].step;
    }
    const int missing = kAll & ~found_;
    if (leaf || !(open & missing)) return;
    Box rest = box;
    rest.open = open;
    rest.score = HUGE_VAL;
    if (missing & kNegative) rest.score = double(least);
    if (missing & kPositive) rest.score = std::min(rest.score, -double(most));
    std::vector<double> weight;
    bool shrunk = false;
    size_t inner = values.size();
    for (size_t axis = 0; axis < sides_.size(); ++axis) {
      const size_t count = sides_[axis].degree + 1;
      inner /= count;
      bool rises = true, falls = true;
      double largest = 0;
      for (size_t at = 0; at + inner < values.size(); ++at) {
        const size_t k = at / inner % count;
        if (k + 1 == count) continue;
        // Of a ray: coefficients of the powers of the distance, as they count at its lower end.
        const T change = values[at + inner] - (IsRay(box, axis) ? T(0) : values[at]);
        rises = rises && change >= 0;
        falls = falls && change <= 0;
        const double reach = IsRay(box, axis) ? std::pow(box.lower[axis] + 1.0, k + 1) : 1.0;
        largest = std::max(largest, std::abs(double(change)) * reach);
      }
      weight.push_back(largest);
      if ((missing & kBoth) == kBoth) continue;
      // Only minima matter while no negative value is known, and the other way round.
      if ((missing & kBoth) == kPositive) std::swap(rises, falls);
      if (!rises && (!falls || IsRay(box, axis))) continue;
      shrunk = shrunk || rest.lower[axis] != rest.upper[axis];
      (rises ? rest.upper : rest.lower)[axis] = (rises ? rest.lower : rest.upper)[axis];
    }
    if (shrunk) {
      Push(std::move(rest));
    } else {
      Cut(rest, weight);
    }
  }

  void Push(Box box) {
    box.number = ++boxes_made_;
    boxes_.push(std::move(box));
  }

  // Cut along the dim with the greatest weight that can be cut.
  void Cut(const Box& box, const std::vector<double>& weight) {
    int chosen = -1;
    for (size_t axis = 0; axis < sides_.size(); ++axis) {
      const bool whole = IsRay(box, axis) ? box.lower[axis] >= kFarthest
                                          : box.upper[axis] <= box.lower[axis];
      if (!whole && (chosen < 0 || weight[axis] > weight[chosen])) chosen = static_cast<int>(axis);
    }
    if (chosen < 0) {
      given_up_ |= box.open;
      return;
    }
    const int64_t low = box.lower[chosen], step = sides_[chosen].step;
    const int64_t reach = IsRay(box, chosen) ? 3 * low + 7 * step : (box.upper[chosen] - low) / 2;
    Box near = box, far = box;
    near.upper[chosen] = low + reach / step * step;
    far.lower[chosen] = near.upper[chosen] + step;
    Push(std::move(near));
    Push(std::move(far));
  }

  const std::vector<int64_t> coefficients_;
  const std::vector<Side> sides_;
  int found_ = 0, possible_ = kAll, given_up_ = 0;
  int64_t boxes_made_ = 0;
  std::vector<int64_t> points_[kPositive + 1];
  std::priority_queue<Box> boxes_;
};

// See analysis/symbolic/comparison/polynomial.py.  `exponents` has one row per coefficient, `sides`
// the lower end, the upper end (negative: none) and the step of each dim.
ffi::Shape PolynomialSigns(const ffi::Shape& coefficients, const ffi::Shape& exponents,
                           const ffi::Shape& sides, int64_t limit) {
  const size_t dims = sides.size() / 3, terms = coefficients.size();
  std::vector<Side> box;
  size_t size = 1;
  for (size_t axis = 0; axis < dims; ++axis) {
    int degree = 0;
    for (size_t i = 0; i < terms; ++i) {
      degree = std::max(degree, static_cast<int>(exponents[i * dims + axis]));
    }
    box.push_back({sides[3 * axis], sides[3 * axis + 1], sides[3 * axis + 2], degree});
    size *= degree + 1;
  }
  std::vector<int64_t> dense(size, 0);
  for (size_t i = 0; i < terms; ++i) {
    size_t at = 0;
    for (size_t axis = 0; axis < dims; ++axis) {
      at = at * (box[axis].degree + 1) + exponents[i * dims + axis];
    }
    dense[at] = coefficients[i];
  }
  SignSearch search(std::move(dense), std::move(box));
  search.Run(limit);
  return search.Result();
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  ffi::reflection::GlobalDef().def("relax_disc.polynomial_signs", PolynomialSigns);
}

}  // namespace relax_disc

// Eight doubles, in one, two or four vector registers. All operations are element by element, so
// results do not depend on the number of vectors.
#ifndef DEEPREDUCE_VALUE_FIT_LANES_H
#define DEEPREDUCE_VALUE_FIT_LANES_H

#include "value/fit_element.h"
#include "value/fit_sides.h"

namespace deepreduce {

constexpr uint32_t kLanes = 8;

// The vector types of `width` doubles. (GCC converts between vectors only if their types do not
// depend on a template argument.)
template <int width>
struct VectorOf;
#define DR_VECTOR_OF(width)                                           \
  template <>                                                         \
  struct VectorOf<width> {                                            \
    typedef double Doubles __attribute__((vector_size(8 * width)));   \
    typedef int64_t Integers __attribute__((vector_size(8 * width))); \
    typedef float Floats __attribute__((vector_size(4 * width)));     \
    static DR_INLINE void load(const float* from, Doubles& to) {      \
      Floats floats;                                                  \
      std::memcpy(&floats, from, sizeof(floats));                     \
      to = __builtin_convertvector(floats, Doubles);                  \
    }                                                                 \
    static DR_INLINE void store(const Doubles& from, float* to) {     \
      const Floats floats = __builtin_convertvector(from, Floats);    \
      std::memcpy(to, &floats, sizeof(floats));                       \
    }                                                                 \
  };
DR_VECTOR_OF(2)
DR_VECTOR_OF(4)
DR_VECTOR_OF(8)
#undef DR_VECTOR_OF

// `width` doubles fill a vector register.
template <int width>
struct Lanes {
  using Vector = typename VectorOf<width>::Doubles;
  using Integers = typename VectorOf<width>::Integers;
  static constexpr int kParts = static_cast<int>(kLanes) / width;
  Vector part[kParts];

  Lanes() = default;
  explicit DR_INLINE Lanes(double all) {
    for (Vector& each : part) each = Vector{} + all;
  }
  static DR_INLINE Lanes sequence(double first, double step) {
    double each[kLanes];
    for (uint32_t lane = 0; lane < kLanes; ++lane) each[lane] = first + step * lane;
    return from_doubles(each);
  }
  static DR_INLINE Lanes from_doubles(const double* from) {
    Lanes result;
    std::memcpy(result.part, from, sizeof(result.part));
    return result;
  }
  // Eight floats.
  static DR_INLINE Lanes load(const float* from) {
    Lanes result;
    for (int i = 0; i < kParts; ++i) VectorOf<width>::load(from + i * width, result.part[i]);
    return result;
  }
  // Loads the `left` remaining floats; the other lanes are 0, which changes no sum.
  static DR_INLINE Lanes load(const float* from, uint32_t left) {
    if (left >= kLanes) return load(from);
    float padded[kLanes] = {};
    for (uint32_t lane = 0; lane < left; ++lane) padded[lane] = from[lane];
    return load(padded);
  }
  DR_INLINE void store(float* to) const {
    for (int i = 0; i < kParts; ++i) VectorOf<width>::store(part[i], to + i * width);
  }
  // Stores the first `left` lanes only.
  DR_INLINE void store(float* to, uint32_t left) const {
    if (left >= kLanes) return store(to);
    float all[kLanes];
    store(all);
    std::memcpy(to, all, left * sizeof(float));
  }
  DR_INLINE void copy_to(double* to) const { std::memcpy(to, part, sizeof(part)); }

#define DR_LANEWISE(op)                                                       \
  friend DR_INLINE Lanes operator op(const Lanes& a, const Lanes& b) {        \
    Lanes result;                                                             \
    for (int i = 0; i < kParts; ++i) result.part[i] = a.part[i] op b.part[i]; \
    return result;                                                            \
  }
  DR_LANEWISE(+)
  DR_LANEWISE(-)
  DR_LANEWISE(*)
#undef DR_LANEWISE

  friend DR_INLINE Lanes absolute(const Lanes& a) {
    Lanes result;
    for (int i = 0; i < kParts; ++i) result.part[i] = (Vector)((Integers)a.part[i] & INT64_MAX);
    return result;
  }
  // a > b ? a : b in each lane; `smaller` is the reverse.
  friend DR_INLINE Lanes larger(const Lanes& a, const Lanes& b) {
    Lanes result;
    for (int i = 0; i < kParts; ++i) result.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
    return result;
  }
  friend DR_INLINE Lanes smaller(const Lanes& a, const Lanes& b) {
    Lanes result;
    for (int i = 0; i < kParts; ++i) result.part[i] = a.part[i] < b.part[i] ? a.part[i] : b.part[i];
    return result;
  }
  friend DR_INLINE Lanes power_of_two(const Lanes& shifted) {
    Lanes result;
    for (int i = 0; i < kParts; ++i)
      result.part[i] = (Vector)(((Integers)shifted.part[i] + 1023) << 52);
    return result;
  }
  // Returns the sum of lanes: adds l and l + 4, then l and l + 2, then l and l + 1.
  DR_INLINE double fold() const {
    double lane[kLanes];
    copy_to(lane);
    for (uint32_t half = kLanes / 2; half >= 1; half /= 2)
      for (uint32_t l = 0; l < half; ++l) lane[l] = lane[l] + lane[l + half];
    return lane[0];
  }
};

// every x86-64 and ARMv8 processor has vectors of two
constexpr int kScalarWidth = 2, kAvx2Width = 4, kAvx512Width = 8;

}  // namespace deepreduce
#endif

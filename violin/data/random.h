// Random numbers whose sequence follows from a key, not from what was drawn before elsewhere. Every image gets a
// generator of its own, keyed by (seed, epoch, index, repeat), so augmentation does not depend on the number of
// workers, on the number of processes or on where a run was resumed.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

namespace violin::data {

// What a generator is for. Two purposes with the same seed never share a sequence.
enum class Purpose : std::uint64_t {
  kAugment = 1,
  kOrder = 2,
  kMix = 3,
  kHoldOut = 4,
  kSubset = 5,
  kReplace = 6,
  kDepth = 7
};

// xoshiro256**, its state filled by SplitMix64 from a hash of the key.
class Random {
 public:
  Random(std::uint64_t seed, Purpose purpose, std::initializer_list<std::int64_t> key = {});

  std::uint64_t bits();
  double uniform();                         // in [0, 1)
  double uniform(double low, double high);  // in [low, high)
  std::int64_t below(std::int64_t count);   // in 0 … count-1, each equally likely
  bool chance(double probability) { return uniform() < probability; }
  double normal();  // mean 0, deviation 1
  double gamma(double shape);
  double beta(double a, double b);

 private:
  std::array<std::uint64_t, 4> state_;
};

}  // namespace violin::data

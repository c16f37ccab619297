#include "violin/data/random.h"

#include <cmath>

namespace violin::data {
namespace {

std::uint64_t splitmix(std::uint64_t& state) {
  std::uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

std::uint64_t rotated(std::uint64_t value, int by) {
  return value << by | value >> (64 - by);
}

constexpr std::size_t kLayers = 128;
constexpr double kTail = 3.442619855899;       // where the lowest layer's tail begins
constexpr double kArea = 9.91256303526217e-3;  // of each layer

struct Layers {
  std::array<double, kLayers + 1> edge;  // of each layer, the widest first
  std::array<double, kLayers> inner;     // share of a layer that lies under the bell for certain

  Layers() {
    double height = std::exp(-0.5 * kTail * kTail);
    edge[0] = kArea / height;
    edge[1] = kTail;
    edge[kLayers] = 0;
    for (std::size_t i = 2; i < kLayers; ++i) {
      edge[i] = std::sqrt(-2 * std::log(kArea / edge[i - 1] + height));
      height = std::exp(-0.5 * edge[i] * edge[i]);
    }
    for (std::size_t i = 0; i < kLayers; ++i) inner[i] = edge[i + 1] / edge[i];
  }
};

}  // namespace

Random::Random(std::uint64_t seed, Purpose purpose, std::initializer_list<std::int64_t> key) {
  // Every word passes through the mixer before the next one is added, so that neighbouring keys share nothing.
  std::uint64_t state = seed;
  state = splitmix(state) ^ static_cast<std::uint64_t>(purpose);
  for (const std::int64_t word : key) state = splitmix(state) ^ static_cast<std::uint64_t>(word);
  for (std::uint64_t& word : state_) word = splitmix(state);
}

std::uint64_t Random::bits() {
  const std::uint64_t result = rotated(state_[1] * 5, 7) * 9;
  const std::uint64_t shifted = state_[1] << 17;
  state_[2] ^= state_[0];
  state_[3] ^= state_[1];
  state_[1] ^= state_[2];
  state_[0] ^= state_[3];
  state_[2] ^= shifted;
  state_[3] = rotated(state_[3], 45);
  return result;
}

double Random::uniform() {
  return static_cast<double>(bits() >> 11) * 0x1p-53;
}

double Random::uniform(double low, double high) {
  return low + (high - low) * uniform();
}

std::int64_t Random::below(std::int64_t count) {
  // Numbers from the incomplete last multiple of `count` are drawn again, so that none is favoured.
  const auto range = static_cast<std::uint64_t>(count);
  const std::uint64_t excess = (0 - range) % range;
  std::uint64_t value = bits();
  while (value < excess) value = bits();
  return static_cast<std::int64_t>(value % range);
}

// The ziggurat method: the area under the bell is cut into 128 layers of the same size, and nearly every draw ends with
// one comparison inside a layer.
double Random::normal() {
  static const Layers layers;
  for (;;) {
    const std::uint64_t drawn = bits();
    const auto i = static_cast<std::size_t>(drawn & (kLayers - 1));
    const double u = static_cast<double>(drawn >> 11) * 0x1p-52 - 1;  // the bits of i are not among these
    if (std::abs(u) < layers.inner[i]) return u * layers.edge[i];
    if (i == 0) {
      double x = 0;
      double y = 0;
      do {
        x = std::log(1 - uniform()) / kTail;
        y = std::log(1 - uniform());
      } while (-2 * y < x * x);
      return u < 0 ? x - kTail : kTail - x;
    }
    const double x = u * layers.edge[i];
    const double low = std::exp(-0.5 * (layers.edge[i] * layers.edge[i] - x * x));
    const double high = std::exp(-0.5 * (layers.edge[i + 1] * layers.edge[i + 1] - x * x));
    if (high + uniform() * (low - high) < 1) return x;
  }
}

// Marsaglia and Tsang's method; shapes below 1 are reached from shape + 1.
double Random::gamma(double shape) {
  if (shape < 1) {
    const double larger = gamma(shape + 1);
    return larger * std::pow(1 - uniform(), 1 / shape);
  }
  const double d = shape - 1.0 / 3.0;
  const double c = 1 / std::sqrt(9 * d);
  for (;;) {
    const double x = normal();
    const double v = std::pow(1 + c * x, 3);
    if (v > 0 && std::log(1 - uniform()) < 0.5 * x * x + d * (1 - v + std::log(v))) return d * v;
  }
}

double Random::beta(double a, double b) {
  const double x = gamma(a);
  const double y = gamma(b);
  return x + y > 0 ? x / (x + y) : 0.5;
}

}  // namespace violin::data

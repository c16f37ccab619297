// Mean and deviation of the pixels of a set of images: what `--statistics data` normalises with.
#pragma once

#include "violin/data/dataset.h"
#include "violin/data/transforms.h"

namespace violin::data {

struct Measurement {
  Normalisation normalisation;
  std::int64_t images = 0;  // that could be read
};

// Every image counts the same, however large it is. The result does not depend on the number of threads. Images that
// cannot be read are passed over; throws violin::Error where there is no other, or where a channel is one flat colour.
Measurement measure_statistics(const SampleSet& set, int threads);

}  // namespace violin::data

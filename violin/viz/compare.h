// Runs side by side, as numbers: groups that differ in their seed only, means with their spread, and differences
// between groups taken seed by seed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace violin::viz {

// Mean and sample deviation; the deviation of one value is not defined.
struct Spread {
  double mean = 0;
  std::optional<double> deviation;
  std::size_t count = 0;
};
Spread spread(const std::vector<double>& values);
std::string to_string(const Spread& spread, bool with_sign = false);  // "31.33 ± 0.47"; "–" for no values

struct RunScore {
  std::string name;
  std::string group;  // equal for runs that differ in their seed only
  std::uint64_t seed = 0;
  std::optional<double> val_top1, test_top1;  // percent
  std::int64_t test_images = 0;
  std::int64_t parameters = 0, mask_parameters = 0;
  double images_per_second = 0;
  std::string val_set, test_set;  // equal for the same images
};

struct RunGroup {
  std::string name;                  // what the names of its runs share
  std::vector<std::size_t> members;  // indices of runs
  std::size_t seeds = 0;             // different ones: runs with the same seed count as one, with their mean
  Spread val, test;                  // over seeds
  // Percentage points above the reference, over the seeds that both have: on test where both have it, otherwise on val.
  Spread difference;
  bool on_test = false;
  bool other_images = false;  // than the reference's were measured: such runs are not compared
  bool reference = false;     // the only group without a mask, or else the first
  std::int64_t parameters = 0, mask_parameters = 0;
  double images_per_second = 0;
};

// In the order in which groups first appear.
std::vector<RunGroup> compare(const std::vector<RunScore>& runs);

// One sentence about a group and the reference: by how much, and whether the seeds tell it from nothing (a paired t
// test at 95%, where a difference of one image counts as noise).
std::string verdict(const RunGroup& group, const RunGroup& reference, std::int64_t test_images);

}  // namespace violin::viz

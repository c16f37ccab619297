#include "violin/viz/compare.h"

#include "violin/number_text.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>

namespace violin::viz {
namespace {

// "violin" of "violin-10" and "violin-11"; of one run, its name.
std::string shared_name(const std::vector<RunScore>& runs, const std::vector<std::size_t>& members) {
  std::string shared = runs[members.front()].name;
  if (members.size() == 1) return shared;
  std::string all;
  for (const std::size_t i : members) {
    const std::string& name = runs[i].name;
    const auto [end, unused] = std::mismatch(shared.begin(), shared.end(), name.begin(), name.end());
    shared.erase(end, shared.end());
    all += (all.empty() ? "" : ", ") + name;
  }
  constexpr const char* kSeparators = "-_. /";
  const std::size_t separator = shared.find_last_of(kSeparators);
  if (separator != std::string::npos && shared.find_first_not_of("0123456789", separator + 1) == std::string::npos)
    shared.resize(separator);
  while (!shared.empty() && std::string(kSeparators).find(shared.back()) != std::string::npos) shared.pop_back();
  return shared.empty() ? all : shared;
}

// Of the runs that have one, by seed: runs that repeat a seed say nothing about other seeds.
std::map<std::uint64_t, double> by_seed(const std::vector<RunScore>& runs, const std::vector<std::size_t>& members,
                                        std::optional<double> RunScore::* top1) {
  std::map<std::uint64_t, std::vector<double>> values;
  for (const std::size_t i : members)
    if (runs[i].*top1) values[runs[i].seed].push_back(*(runs[i].*top1));
  std::map<std::uint64_t, double> means;
  for (const auto& [seed, list] : values) means[seed] = spread(list).mean;
  return means;
}

Spread over_seeds(const std::map<std::uint64_t, double>& means) {
  std::vector<double> values;
  for (const auto& [seed, mean] : means) values.push_back(mean);
  return spread(values);
}

// Two-sided, 95%.
double student_t(std::size_t degrees) {
  constexpr std::array<double, 10> kTable = {12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23};
  return degrees <= kTable.size() ? kTable[degrees - 1] : 2.2;
}

}  // namespace

Spread spread(const std::vector<double>& values) {
  Spread result;
  result.count = values.size();
  if (values.empty()) return result;
  for (const double value : values) result.mean += value / static_cast<double>(values.size());
  if (values.size() < 2) return result;
  double squares = 0;
  for (const double value : values) squares += (value - result.mean) * (value - result.mean);
  result.deviation = std::sqrt(squares / static_cast<double>(values.size() - 1));
  return result;
}

std::string to_string(const Spread& spread, bool with_sign) {
  if (spread.count == 0) return "–";
  return number_text(spread.mean, with_sign ? "%+.2f" : "%.2f") +
         (spread.deviation ? " ± " + number_text(*spread.deviation, "%.2f") : "");
}

std::vector<RunGroup> compare(const std::vector<RunScore>& runs) {
  std::vector<RunGroup> groups;
  std::map<std::string, std::size_t> known;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto [place, added] = known.emplace(runs[i].group, groups.size());
    if (added) groups.emplace_back();
    groups[place->second].members.push_back(i);
  }
  std::map<std::string, int> names;
  for (RunGroup& group : groups) {
    std::set<std::uint64_t> seeds;
    for (const std::size_t i : group.members) {
      seeds.insert(runs[i].seed);
      group.images_per_second += runs[i].images_per_second / static_cast<double>(group.members.size());
    }
    group.seeds = seeds.size();
    group.val = over_seeds(by_seed(runs, group.members, &RunScore::val_top1));
    group.test = over_seeds(by_seed(runs, group.members, &RunScore::test_top1));
    group.parameters = runs[group.members.front()].parameters;
    group.mask_parameters = runs[group.members.front()].mask_parameters;
    group.name = shared_name(runs, group.members);
    ++names[group.name];
  }
  for (RunGroup& group : groups) {
    if (names[group.name] < 2) continue;
    group.name.clear();
    for (const std::size_t i : group.members) group.name += (group.name.empty() ? "" : ", ") + runs[i].name;
  }
  if (groups.empty()) return groups;

  const auto unmasked = [](const RunGroup& group) { return group.mask_parameters == 0; };
  const auto first = std::find_if(groups.begin(), groups.end(), unmasked);
  RunGroup& reference = std::count_if(groups.begin(), groups.end(), unmasked) == 1 ? *first : groups.front();
  reference.reference = true;
  for (RunGroup& group : groups) {
    if (group.reference) continue;
    group.on_test = group.test.count > 0 && reference.test.count > 0;
    const auto top1 = group.on_test ? &RunScore::test_top1 : &RunScore::val_top1;
    const auto images = group.on_test ? &RunScore::test_set : &RunScore::val_set;
    const std::map<std::uint64_t, double> ours = by_seed(runs, group.members, top1);
    const std::map<std::uint64_t, double> theirs = by_seed(runs, reference.members, top1);
    // Held-out images follow the seed; test images are the same for all seeds.
    for (const std::size_t i : group.members)
      for (const std::size_t j : reference.members)
        group.other_images |= runs[i].*images != runs[j].*images && (group.on_test || runs[i].seed == runs[j].seed);
    std::vector<double> differences;
    for (const auto& [seed, mean] : ours) {
      const auto other = theirs.find(seed);
      if (other != theirs.end() && !group.other_images) differences.push_back(mean - other->second);
    }
    group.difference = spread(differences);
  }
  return groups;
}

std::string verdict(const RunGroup& group, const RunGroup& reference, std::int64_t test_images) {
  const Spread& difference = group.difference;
  const std::string pair = group.name + " against " + reference.name + ": ";
  if (group.other_images)
    return pair + "measured on other " + (group.on_test ? "test" : "validation") +
           " images, so no difference is taken.";
  if (difference.count == 0) return pair + "no seed in common, so no difference is taken.";
  const std::string text = pair + to_string(difference, true) + " points on " + (group.on_test ? "test" : "val");
  if (!difference.deviation) return text + " with one seed, which says nothing about noise.";
  const double image = test_images > 0 ? 100 / static_cast<double>(test_images) : 0;
  const double error = std::max(*difference.deviation, image) / std::sqrt(static_cast<double>(difference.count));
  const bool clear = std::abs(difference.mean) > student_t(difference.count - 1) * error;
  return text + " over " + std::to_string(difference.count) + " seeds, " +
         (!clear                ? "which these seeds do not tell from no difference."
          : difference.mean > 0 ? "a gain beyond the spread of the seeds."
                                : "a loss beyond the spread of the seeds.");
}

}  // namespace violin::viz

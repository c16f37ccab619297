// The page about one run or several: one HTML file that loads nothing from outside, readable in light and dark, narrow
// and wide. Plain data in, text out; who collects the data is not known here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "violin/viz/attention_sheet.h"
#include "violin/viz/decay_chart.h"
#include "violin/viz/scene.h"

namespace violin::viz {

struct EpochRow {
  double epoch = 0;  // counted from 1
  double lr = 0;
  double train_loss = 0;
  std::optional<double> val_loss, val_top1;
};

struct Prediction {
  Image image;
  HeatMap attention;
  std::string name;
  std::string label;
  std::string guess;
  double probability = 0;  // of the guess
  bool right = false;
};

struct RunReport {
  std::string name;
  std::string group;                                         // runs of one group differ in their seed only
  std::vector<std::pair<std::string, std::string>> facts;    // the main ones
  std::vector<std::pair<std::string, std::string>> options;  // everything
  std::vector<EpochRow> epochs;
  std::optional<double> best_top1;  // val
  std::optional<double> test_top1;
  double images_per_second = 0;
  std::int64_t parameters = 0, mask_parameters = 0;
  std::optional<DecayChart> decay;
  std::optional<Scene> masks;  // of chosen heads around reference patches
  std::vector<std::string> classes;
  std::vector<std::vector<std::int64_t>> confusion;
  std::vector<Prediction> best, worst;  // sure and right; sure and wrong
  std::vector<Prediction> shared;       // the same images in every run
  std::vector<std::string> notes;       // what could not be shown, and why
};

struct Report {
  std::string title;
  std::string footer;
  std::vector<RunReport> runs;
  std::optional<Scene> curves;
};

std::string report_html(const Report& report);

// Mean and sample deviation; the deviation of one value is not defined.
struct Spread {
  double mean = 0;
  std::optional<double> deviation;
  std::size_t count = 0;
};
Spread spread(const std::vector<double>& values);

}  // namespace violin::viz

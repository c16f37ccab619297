// The page about one run or several: one HTML file that loads nothing from outside, readable in light and dark, narrow
// and wide. Plain data in, text out; who collects the data is not known here.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "violin/viz/attention_sheet.h"
#include "violin/viz/compare.h"
#include "violin/viz/decay_chart.h"
#include "violin/viz/scene.h"

namespace violin::viz {

struct EpochRow {
  double epoch = 0;  // counted from 1
  double lr = 0;
  double train_loss = 0;  // NaN where it was not a number
  std::optional<double> val_loss, val_top1;
};

struct Prediction {
  Image image;  // as the model saw it
  HeatMap attention;
  std::string id;  // tells images apart
  std::string name;
  std::string label;
  std::string guess;
  double probability = 0;  // of the guess
  bool right = false;
};

// The mean of a head's mask over all pairs of patches: 1 is no locality at all.
struct MaskMeans {
  std::vector<std::int64_t> blocks;
  std::int64_t heads = 0;
  std::vector<double> values;  // [blocks, heads]
};

struct RunReport {
  RunScore score;
  std::vector<std::pair<std::string, std::string>> facts;    // the main ones
  std::vector<std::pair<std::string, std::string>> options;  // everything
  std::vector<EpochRow> epochs;
  std::optional<DecayChart> decay;
  std::optional<MaskMeans> means;
  std::optional<Scene> masks;  // of chosen heads around reference patches
  std::vector<std::string> classes;
  std::vector<std::vector<std::int64_t>> confusion;
  std::string predicted;                // "300 images of test"
  std::vector<Prediction> best, worst;  // sure and right; sure and wrong
  std::vector<Prediction> shared;       // the same images in every run
  std::vector<std::string> notes;       // what could not be shown, and why
};

struct Report {
  std::string title;
  std::string footer;
  std::vector<RunReport> runs;
  std::vector<Scene> curves;       // a gallery for each set of curves
  std::vector<std::string> notes;  // about the runs together
};

// Pictures stop where they would make the page larger than about 4 MB.
std::string report_html(const Report& report);

}  // namespace violin::viz

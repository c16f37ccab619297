// violin mask: the decay around chosen patches, gamma to the power of the distance along each curve, and the mean of
// the curves.

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/common.h"
#include "violin/viz/pictures.h"
#include "violin/viz/terminal.h"

namespace violin::cli {
namespace {

struct Options {
  GridOptions grid;
  PictureOptions picture;
  std::vector<double> gammas;
  std::vector<std::string> cells;
  bool json = false;
};

std::vector<std::int64_t> sides_of(const curves::Grid& grid) {
  if (grid.is_3d()) return {grid.frames, grid.height, grid.width};
  return {grid.height, grid.width};
}

// "7,7", or "2,7,7" in a grid with frames, to the number of the cell.
std::int64_t parse_cell(std::string_view text, const curves::Grid& grid) {
  const std::vector<std::int64_t> sides = sides_of(grid);
  const std::string wanted = grid.is_3d() ? "FRAME,ROW,COLUMN" : "ROW,COLUMN";
  const Usage malformed("--at '" + std::string(text) + "': expected " + wanted + ", whole numbers from 0");
  std::int64_t cell = 0;
  std::string_view left = text;
  for (std::size_t i = 0; i < sides.size(); ++i) {
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(left.data(), left.data() + left.size(), value);
    const bool out_of_range = error == std::errc::result_out_of_range;
    if (error != std::errc() && !out_of_range) throw malformed;
    left.remove_prefix(static_cast<std::size_t>(end - left.data()));
    const bool last = i + 1 == sides.size();
    if (last ? !left.empty() : !left.starts_with(',')) throw malformed;
    if (!last) left.remove_prefix(1);
    if (out_of_range || value < 0 || value >= sides[i]) {
      throw Usage("--at '" + std::string(text) + "' is outside of the grid " + grid.to_string() +
                  " (cells count from 0)");
    }
    cell = cell * sides[i] + value;
  }
  return cell;
}

std::vector<std::int64_t> place_of(std::int64_t cell, const curves::Grid& grid) {
  std::vector<std::int64_t> place;
  if (grid.is_3d()) place.push_back(cell / (grid.height * grid.width));
  place.push_back(cell / grid.width % grid.height);
  place.push_back(cell % grid.width);
  return place;
}

viz::MaskSweep make_sweep(const Options& options, const Request& request) {
  viz::MaskSweep sweep{.grid = request.grid, .curves = request.curves, .gammas = options.gammas, .cells = {}};
  if (sweep.gammas.empty()) sweep.gammas = {0.98};
  for (const double gamma : sweep.gammas) {
    if (!(gamma > 0 && gamma <= 1)) throw Usage("--gamma must be above 0 and at most 1");
  }
  const curves::Grid& grid = request.grid;
  const auto add = [&sweep](std::int64_t cell) {
    if (std::find(sweep.cells.begin(), sweep.cells.end(), cell) == sweep.cells.end()) sweep.cells.push_back(cell);
  };
  for (const std::string& text : options.cells) add(parse_cell(text, grid));
  if (sweep.cells.empty()) {
    add(0);
    add(((grid.is_3d() ? grid.frames / 2 : 0) * grid.height + grid.height / 2) * grid.width + grid.width / 2);
    add(grid.cells() - 1);
  }
  return sweep;
}

// One mask per gamma and cell: the field of every curve, and their mean.
struct Mask {
  double gamma = 1;
  std::int64_t cell = 0;
  std::vector<std::vector<double>> fields;
  std::vector<double> mean;
};

template <typename Use>
void for_each_mask(const viz::MaskSweep& sweep, const Use& use) {
  const curves::Coordinates coordinates = curves::coordinates(sweep.curves, sweep.grid);
  for (const double gamma : sweep.gammas) {
    for (const std::int64_t cell : sweep.cells) {
      Mask mask{.gamma = gamma, .cell = cell, .fields = {}, .mean = {}};
      for (std::int64_t c = 0; c < coordinates.curves; ++c) {
        mask.fields.push_back(viz::decay_field(coordinates, c, cell, gamma));
      }
      mask.mean = viz::mean_field(mask.fields);
      use(mask);
    }
  }
}

// {"grid":[14,14],"masks":[{"gamma":0.98,"at":[0,0],"curves":{"snake":[value of (0,0), ...],...},"mean":[...]},...]}
void print_json(const viz::MaskSweep& sweep, const Request& request) {
  print("{\"grid\":" + nlohmann::json(sides_of(sweep.grid)).dump() + ",\"masks\":[");
  bool first = true;
  for_each_mask(sweep, [&](const Mask& mask) {
    nlohmann::ordered_json fields = nlohmann::ordered_json::object();
    for (std::size_t c = 0; c < mask.fields.size(); ++c) fields[request.named[c].name] = mask.fields[c];
    const nlohmann::ordered_json out = {{"gamma", mask.gamma},
                                        {"at", place_of(mask.cell, sweep.grid)},
                                        {"curves", std::move(fields)},
                                        {"mean", mask.mean}};
    print((first ? "" : ",") + out.dump());
    first = false;
  });
  print("]}\n");
}

std::string heading(const Mask& mask, const curves::Grid& grid) {
  char gamma[32];
  std::snprintf(gamma, sizeof gamma, "%.6g", mask.gamma);
  std::string text = std::string("gamma ") + gamma + ", around ";
  for (const std::int64_t part : place_of(mask.cell, grid)) text += std::to_string(part) + ",";
  text.back() = '\n';
  return text;
}

// Heat maps where they fit on the screen; numbers in any case.
void print_text(const viz::MaskSweep& sweep, const Request& request) {
  constexpr std::int64_t kMaxLines = 32;
  const Terminal screen = terminal();
  for_each_mask(sweep, [&](const Mask& mask) {
    std::vector<std::string> titles;
    std::vector<viz::TextBlock> blocks;
    std::vector<std::vector<std::string>> rows = {{"curve", "smallest", "mean", "cells above 1/2"}};
    const auto add = [&](const std::string& name, const std::vector<double>& field) {
      titles.push_back(name);
      double total = 0;
      for (const double value : field) total += value;
      char smallest[32];
      char mean[32];
      std::snprintf(smallest, sizeof smallest, "%.4f", *std::min_element(field.begin(), field.end()));
      std::snprintf(mean, sizeof mean, "%.4f", total / static_cast<double>(field.size()));
      const auto above = std::count_if(field.begin(), field.end(), [](double value) { return value > 0.5; });
      rows.push_back({name, smallest, mean, std::to_string(above)});
      const std::int64_t columns = sweep.grid.cells() / sweep.grid.height * 2;
      if (sweep.grid.height <= kMaxLines && columns <= screen.width) {
        blocks.push_back(viz::heat_block(field, sweep.grid, mask.cell, screen.color));
      }
    };
    for (std::size_t c = 0; c < mask.fields.size(); ++c) add(request.named[c].name, mask.fields[c]);
    if (mask.fields.size() > 1) add("mean", mask.mean);
    print(heading(mask, sweep.grid) + "\n" + viz::side_by_side(blocks, titles, screen.width) + viz::table(rows) + "\n");
  });
}

void run_mask(const Options& options) {
  if (options.json && options.picture.wanted()) throw Usage("--json prints values: it does not go with --svg or --png");
  const Request request = parse_request(options.grid);
  const viz::MaskSweep sweep = make_sweep(options, request);
  if (options.json) return print_json(sweep, request);
  if (options.picture.wanted()) return write_pictures(viz::mask_panels(sweep), options.picture);
  print_text(sweep, request);
}

}  // namespace

void add_mask(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("mask", "The decay mask around patches, per curve and on average");
  verb->group("Verbs");
  add_grid_options(*verb, options->grid);
  verb->add_option("--gamma", options->gammas, "Decay per step along a curve (default 0.98); repeat it for a sweep")
      ->type_name("G")
      ->allow_extra_args(false)
      ->group("Mask");
  verb->add_option("--at", options->cells, "Reference patch; may be repeated (default: first, middle and last)")
      ->type_name("ROW,COLUMN")
      ->allow_extra_args(false)
      ->group("Mask");
  verb->add_flag("--json", options->json, "Print the values of every cell, row by row, and nothing else")
      ->group("Output");
  add_picture_options(*verb, options->picture);
  verb->footer(R"(The value at a patch is gamma to the power of its distance from the reference patch along the curve.

Examples:
  violin mask --grid 14x14 --set violin --gamma 0.98 --at 0,0 --at 7,7 --at 13,13 --png mask.png
  violin mask --grid 16x16 --gamma 0.9 --gamma 0.98 --gamma 0.996 --at 8,8 --svg sweep.svg
  violin mask --grid 8x8 --curve hilbert --at 0,0)");
  verb->callback([options] { run_mask(*options); });
}

}  // namespace violin::cli

// violin curves: the ranks of space-filling curves as JSON, in the terminal, or as a picture.

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/common.h"
#include "violin/data/image.h"
#include "violin/viz/pictures.h"
#include "violin/viz/terminal.h"

namespace violin::cli {
namespace {

struct Options {
  GridOptions grid;
  PictureOptions picture;
  std::optional<std::string> image;
  bool flatten = false;
  bool json = false;
};

// {"grid":[14,10],"curves":{"hilbert":[rank of (0,0), (0,1), ...], ...}}; manhattan has one array per axis.
void print_json(const Request& request) {
  const curves::Grid& grid = request.grid;
  std::vector<std::int64_t> sides = {grid.height, grid.width};
  if (grid.is_3d()) sides.insert(sides.begin(), grid.frames);
  print("{\"grid\":" + nlohmann::json(sides).dump() + ",\"curves\":{");
  for (std::size_t i = 0; i < request.named.size(); ++i) {
    const auto& [name, curve] = request.named[i];
    print((i > 0 ? "," : "") + nlohmann::json(name).dump() + ":");
    if (curve.kind != curves::Kind::kManhattan) {
      print_array(*curves::ranks(curve, grid));
      continue;
    }
    const curves::Coordinates axes = curves::coordinates({&curve, 1}, grid);
    for (std::int64_t a = 0; a < axes.axes; ++a) {
      print(a == 0 ? "[" : ",");
      print_array(std::span(axes.values)
                      .subspan(static_cast<std::size_t>(a * axes.tokens), static_cast<std::size_t>(axes.tokens)));
    }
    print("]");
  }
  print("}}\n");
}

std::string decimal(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

void print_statistics(const Request& request) {
  std::vector<std::vector<std::string>> rows = {
      {"curve", "unit", "diagonal", "jumps", "mean jump", "longest", "neighbours", "correlation"}};
  for (const auto& [name, curve] : request.named) {
    if (curve.kind == curves::Kind::kManhattan) {
      rows.push_back({name, "-", "-", "-", "-", "-", "1.0", "-"});
      continue;
    }
    const curves::Locality s = curves::locality(*curves::ranks(curve, request.grid), request.grid);
    rows.push_back({name, std::to_string(s.unit_steps), std::to_string(s.diagonal_steps), std::to_string(s.jumps),
                    decimal(s.mean_jump, 1), decimal(s.max_step, 1), decimal(s.mean_neighbour_distance, 1),
                    decimal(s.distance_correlation, 3)});
  }
  print(viz::table(rows));
}

// Drawn where every curve fits on the screen, one at a time at least.
void print_paths(const Request& request) {
  constexpr std::int64_t kMaxLines = 32;
  constexpr std::int64_t kMaxCells = 4096;
  const Terminal screen = terminal();
  if (request.grid.height > kMaxLines || request.grid.cells() > kMaxCells) return;
  std::vector<viz::TextBlock> blocks;
  std::vector<std::string> titles;
  for (const auto& [name, curve] : request.named) {
    viz::TextBlock block = viz::path_block(curve, request.grid, screen.color);
    if (block.lines.empty() || block.width > screen.width) continue;
    blocks.push_back(std::move(block));
    titles.push_back(name);
  }
  print(viz::side_by_side(blocks, titles, screen.width));
}

void run_curves(const Options& options) {
  if (options.json && (options.picture.wanted() || options.flatten || options.image)) {
    throw Usage("--json prints ranks: it does not go with --svg, --png, --image or --flatten");
  }
  if (!options.picture.wanted() && options.flatten)
    throw Usage("--flatten makes a picture: add --svg FILE or --png FILE");
  if (!options.picture.wanted() && options.image) throw Usage("--image makes a picture: add --svg FILE or --png FILE");
  const Request request = parse_request(options.grid);
  if (options.json) return print_json(request);

  if (options.picture.wanted()) {
    std::optional<Image> photo;
    if (options.image) photo = load_image(*options.image);
    const auto draw = options.flatten ? viz::flattened : viz::curve_gallery;
    write_pictures(draw(request.curves, request.grid, photo ? &*photo : nullptr), options.picture,
                   {options.image.value_or("")});
  } else {
    print_paths(request);
  }
  print_statistics(request);
}

}  // namespace

void add_curves(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* verb =
      app.add_subcommand("curves", "Space-filling curves over a grid of patches: ranks, statistics, pictures");
  verb->group("Verbs");
  add_grid_options(*verb, options->grid);
  verb->add_flag("--json", options->json, "Print the ranks of every cell, row by row, and nothing else")
      ->group("Output");
  add_picture_options(*verb, options->picture);
  verb->add_option("--image", options->image, "Draw over the patches of this photo (JPEG, PNG)")
      ->type_name("FILE")
      ->group("Output");
  verb->add_flag("--flatten", options->flatten, "Draw the image as the sequence of its patches, z order first")
      ->group("Output");
  std::string names;
  for (const std::string& name : curves::curve_names()) names += (names.empty() ? "" : ", ") + name;
  verb->footer("Curves: " + names + ".\n" +
               R"(morton is another name of peano; random:7 has a seed; frame:NAME repeats a curve in every frame.

The table: steps to a neighbour, across a corner and further (jumps); how long jumps are on average and
the longest step; how far apart edge neighbours are along the curve on average; and how well distance
along the curve follows distance in the image (rank correlation, 1 is perfect).

Examples:
  violin curves --grid 8x8 --set normal
  violin curves --grid 14x10 --curve hilbert --curve snake_T --json
  violin curves --png curves.png
  violin curves --image photo.jpg --flatten --svg sequence.svg)");
  verb->callback([options] { run_curves(*options); });
}

}  // namespace violin::cli

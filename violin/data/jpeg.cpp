// clang-format off: jpeglib.h needs FILE, jerror.h needs jpeglib.h
#include <cstdio>
#include <jpeglib.h>
#include <jerror.h>
// clang-format on

#include <csetjmp>
#include <cstring>
#include <string>
#include <vector>

#include "violin/data/codecs.h"
#include "violin/error.h"

namespace violin::codec {
namespace {

// A progressive file may ask for any number of passes over all coefficients; real ones have about ten.
constexpr int kMaxScans = 200;

// libjpeg leaves through longjmp, which runs no destructors: the functions that call setjmp hold plain data only, and
// everything that must be freed belongs to their callers.
struct Reader {
  jpeg_decompress_struct info = {};
  jpeg_error_mgr errors = {};
  jpeg_progress_mgr progress = {};
  std::jmp_buf escape = {};
  char message[JMSG_LENGTH_MAX] = {};

  Reader() = default;
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  ~Reader() { jpeg_destroy_decompress(&info); }
};

Reader& reader_of(j_common_ptr info) {
  return *static_cast<Reader*>(info->client_data);
}

[[noreturn]] void leave(j_common_ptr info, const char* message) {
  Reader& reader = reader_of(info);
  std::snprintf(reader.message, sizeof reader.message, "%s", message);
  std::longjmp(reader.escape, 1);
}

void on_error(j_common_ptr info) {
  char message[JMSG_LENGTH_MAX];
  info->err->format_message(info, message);
  leave(info, message);
}

// libjpeg would pad a file that ends early with grey. Other warnings (stray bytes between segments) are common in the
// wild.
void on_message(j_common_ptr info, int level) {
  if (level < 0 && info->err->msg_code == JWRN_JPEG_EOF) leave(info, "the file is truncated");
}

void on_progress(j_common_ptr info) {
  if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number > kMaxScans) leave(info, "too many scans");
}

// The output is the image itself, or the largest of its half, quarter and eighth that has at most `max_pixels`: libjpeg
// makes those as it decodes, without ever holding the whole. Files of several scans are held whole and stay as they
// are.
bool read_header(Reader& reader, std::span<const std::uint8_t> bytes, std::int64_t max_pixels) {
  jpeg_decompress_struct& info = reader.info;
  info.err = jpeg_std_error(&reader.errors);
  info.client_data = &reader;
  reader.errors.error_exit = on_error;
  reader.errors.emit_message = on_message;
  reader.progress.progress_monitor = on_progress;
  if (setjmp(reader.escape) != 0) return false;
  jpeg_create_decompress(&info);  // keeps err and client_data
  info.progress = &reader.progress;
  jpeg_mem_src(&info, bytes.data(), bytes.size());
  jpeg_save_markers(&info, JPEG_APP0 + 1, 0xFFFF);
  jpeg_read_header(&info, TRUE);
  const bool four = info.jpeg_color_space == JCS_CMYK || info.jpeg_color_space == JCS_YCCK;
  info.out_color_space = four ? JCS_CMYK : JCS_RGB;
  jpeg_calc_output_dimensions(&info);
  const auto too_large = [&] { return std::int64_t{info.output_width} * info.output_height > max_pixels; };
  for (unsigned part = 2; part <= 8 && too_large() && jpeg_has_multiple_scans(&info) == FALSE; part *= 2) {
    info.scale_num = 1;
    info.scale_denom = part;
    jpeg_calc_output_dimensions(&info);
  }
  return true;
}

// `pixels` is [height, width, 3]; `row`, four bytes per pixel, is used by CMYK images only.
bool read_pixels(Reader& reader, std::uint8_t* pixels, std::uint8_t* row) {
  jpeg_decompress_struct& info = reader.info;
  if (setjmp(reader.escape) != 0) return false;
  jpeg_start_decompress(&info);
  const std::size_t width = info.output_width;
  while (info.output_scanline < info.output_height) {
    std::uint8_t* out = pixels + info.output_scanline * width * 3;
    if (info.out_color_space == JCS_RGB) {
      jpeg_read_scanlines(&info, &out, 1);
      continue;
    }
    jpeg_read_scanlines(&info, &row, 1);
    for (std::size_t x = 0; x < width; ++x) {
      const int key = row[x * 4 + 3];
      for (std::size_t c = 0; c < 3; ++c) {
        out[x * 3 + c] = static_cast<std::uint8_t>((row[x * 4 + c] * key + 127) / 255);
      }
    }
  }
  jpeg_finish_decompress(&info);  // reads on to the end marker, so that a missing tail is noticed
  return true;
}

int orientation_of(const jpeg_decompress_struct& info) {
  constexpr char kExif[] = "Exif\0";  // with its closing zero, the six bytes in front of the TIFF block
  for (auto* marker = info.marker_list; marker != nullptr; marker = marker->next) {
    if (marker->data_length > sizeof kExif && std::memcmp(marker->data, kExif, sizeof kExif) == 0) {
      return exif_orientation({marker->data + sizeof kExif, marker->data_length - sizeof kExif});
    }
  }
  return 1;
}

}  // namespace

bool is_jpeg(std::span<const std::uint8_t> bytes) {
  return bytes.size() >= 3 && bytes[0] == 0xFF && bytes[1] == 0xD8 && bytes[2] == 0xFF;
}

Image decode_jpeg(std::span<const std::uint8_t> bytes, std::int64_t max_pixels, int& orientation) {
  Reader reader;
  if (!read_header(reader, bytes, max_pixels)) throw Error(std::string("broken JPEG: ") + reader.message);
  const jpeg_decompress_struct& info = reader.info;
  // Of an image that is too large, the message names the size of the whole.
  const bool fits = std::int64_t{info.output_width} * info.output_height <= max_pixels;
  check_size(fits ? info.output_width : info.image_width, fits ? info.output_height : info.image_height, max_pixels);
  orientation = orientation_of(info);

  Image image(info.output_width, info.output_height);
  std::vector<std::uint8_t> row(reader.info.out_color_space == JCS_CMYK ? static_cast<std::size_t>(image.width) * 4
                                                                        : 0);
  if (!read_pixels(reader, image.pixels.data(), row.data())) throw Error(std::string("broken JPEG: ") + reader.message);
  return image;
}

}  // namespace violin::codec

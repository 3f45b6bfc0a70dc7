// The echo game: plays whatever the service shows, by fixed rules, so that `penstock check-client` knows each byte.
//
//   cc -O2 -c ../c/penstock_game.c
//   c++ -std=c++17 -O2 -I../c -o echo_game echo_game.cpp penstock_game.o
//   ./echo_game HOST PORT [EPISODES]
#include "penstock_game.hpp"

#include <algorithm>
#include <iostream>
#include <string>
#include <vector>

namespace {

constexpr std::uint32_t SEATS = 3;

// The values that an element of integers may have; more than 97 are not used.
struct Range {
  std::int64_t low = 0;
  std::int64_t count = 2;
};

struct Seat {
  std::uint64_t rows = 0;     // that it has shown since the process began
  std::uint64_t episode = 0;  // number of the present or the next one
  std::uint64_t actions = 0;  // in the present episode
  bool is_playing = false;

  // An episode that was broken off is not resumed.
  void break_off() {
    episode += is_playing;
    is_playing = false;
  }
};

std::vector<const char *> children(const char *container) {
  std::vector<const char *> found;
  for (const char *at = penstock_json_first(container); at; at = penstock_json_next(at)) found.push_back(at);
  return found;
}

// Appends the numbers of nested lists, or of one number.
void flatten(const char *value, std::vector<std::int64_t> &numbers) {
  if (*value == '[') {
    for (const char *inner : children(value)) flatten(inner, numbers);
    return;
  }
  std::int64_t number = 0;
  penstock_json_integer(value, &number);
  numbers.push_back(number);
}

std::vector<std::int64_t> flattened(const char *value) {
  std::vector<std::int64_t> numbers;
  flatten(value, numbers);
  return numbers;
}

// Returns the ranges of a space of integers: of each element, or one for all.
std::vector<Range> ranges_of(const char *space) {
  std::vector<Range> ranges;
  if (const char *discrete = penstock_json_member(space, "Discrete")) {
    auto numbers = flattened(discrete);
    return {{numbers.at(1), numbers.at(0)}};
  }
  if (const char *several = penstock_json_member(space, "MultiDiscrete")) {
    auto counts = flattened(children(several).at(0)), starts = flattened(children(several).at(1));
    for (std::size_t i = 0; i < counts.size(); i++) ranges.push_back({starts.at(i), counts[i]});
    return ranges;
  }
  if (const char *box = penstock_json_member(space, "Box")) {
    auto lows = flattened(children(box).at(0)), highs = flattened(children(box).at(1));
    for (std::size_t i = 0; i < std::max(lows.size(), highs.size()); i++) {
      std::int64_t low = lows.at(lows.size() == 1 ? 0 : i), high = highs.at(highs.size() == 1 ? 0 : i);
      std::uint64_t span = static_cast<std::uint64_t>(high) - static_cast<std::uint64_t>(low);
      ranges.push_back({low, static_cast<std::int64_t>(std::min<std::uint64_t>(span, 96)) + 1});
    }
    return ranges;
  }
  return {{}};  // MultiBinary
}

// Appends the ranges of each column, in their order.
void list_ranges(const char *space, std::vector<std::vector<Range>> &columns) {
  if (const char *dict = penstock_json_member(space, "Dict")) {
    for (const char *part : children(dict)) list_ranges(children(part).at(1), columns);
  } else if (const char *tuple = penstock_json_member(space, "Tuple")) {
    for (const char *part : children(tuple)) list_ranges(part, columns);
  } else {
    columns.push_back(ranges_of(space));
  }
}

template <class T>
void fill(penstock::Span<T> elements, const std::vector<Range> &ranges, bool is_mask, std::uint64_t v) {
  for (std::size_t i = 0; i < elements.size(); i++, v = (v + 3) % 97) {
    const Range &range = ranges.at(ranges.size() == 1 ? 0 : i);
    if constexpr (std::is_floating_point_v<T>) {
      elements[i] = static_cast<T>(v) / 97;
    } else {
      auto number = range.low + static_cast<std::int64_t>(v) % range.count;
      elements[i] = static_cast<T>(is_mask ? 1 : number);
    }
  }
}

class EchoGame {
 public:
  EchoGame(const penstock::Options &options, std::uint64_t episodes) : game_(options), episodes_(episodes) {
    list_ranges(penstock_json_member(game_.welcome().json, "observation"), ranges_);
  }

  void play() {
    for (std::uint64_t round = 0; !is_over(); round++) {
      // In every third round seat 2 has a STEP of its own, as if it were its turn.
      for (std::uint32_t seat = 0; seat < SEATS; seat++) {
        if (seats_[seat].episode == episodes_) continue;
        if (seat == 2 && round % 3 == 2) game_.send();
        add_row(seat);
      }
      if (!game_.step()) begin_anew();
      for (std::uint32_t seat = 0; seat < SEATS; seat++) {
        if (game_.phase(seat) == PENSTOCK_AT_FAULT && seats_[seat].is_playing) {
          std::cerr << game_.error() << "\n";
          seats_[seat].break_off();
        }
      }
    }
  }

 private:
  bool is_over() const {
    return std::all_of(seats_.begin(), seats_.end(), [this](const Seat &seat) { return seat.episode == episodes_; });
  }

  void begin_anew() {
    std::cerr << game_.error() << "\n";
    for (Seat &seat : seats_) seat.break_off();
    game_.reconnect();
    ranges_.clear();
    list_ranges(penstock_json_member(game_.welcome().json, "observation"), ranges_);
  }

  void add_row(std::uint32_t number) {
    Seat &seat = seats_[number];
    unsigned flags = 0;
    float reward = 0;
    if (seat.is_playing) {
      reward = checksum(game_.action_bytes(number));
      seat.actions++;
      if (seat.actions == 3 + (number + 2 * seat.episode) % 5) {
        flags = seat.episode % 2 ? penstock::truncated : penstock::terminated;
        seat.break_off();
      }
    } else {
      flags = penstock::first;
      seat.is_playing = true;
      seat.actions = 0;
    }
    if (std::uint8_t *row = game_.add_row(number, flags, reward)) fill_row(row, number, seat.rows++);
  }

  void fill_row(std::uint8_t *row, std::uint32_t seat, std::uint64_t k) const {
    std::uint64_t v = (k * 31 + seat * 7) % 97;
    for (std::size_t c = 0; c < game_.welcome().columns_count; c++) {
      const penstock_column &column = game_.welcome().columns[c];
      auto fill_as = [&](auto zero) {
        using T = decltype(zero);
        fill(penstock::Column<T>(column).in(row), ranges_.at(c), column.name == std::string("action_mask"), v);
      };
      switch (column.dtype[1] * 16 + column.dtype[2] - '0') {
        case 'f' * 16 + 4: fill_as(float{}); break;
        case 'f' * 16 + 8: fill_as(double{}); break;
        case 'i' * 16 + 1: fill_as(std::int8_t{}); break;
        case 'i' * 16 + 2: fill_as(std::int16_t{}); break;
        case 'i' * 16 + 4: fill_as(std::int32_t{}); break;
        case 'i' * 16 + 8: fill_as(std::int64_t{}); break;
        case 'b' * 16 + 1: fill_as(std::uint8_t{}); break;
        case 'u' * 16 + 1: fill_as(std::uint8_t{}); break;
        case 'u' * 16 + 2: fill_as(std::uint16_t{}); break;
        case 'u' * 16 + 4: fill_as(std::uint32_t{}); break;
        default: fill_as(std::uint64_t{});
      }
      v = (v + 3 * column.count) % 97;
    }
  }

  float checksum(const std::uint8_t *action) const {
    unsigned sum = 0;
    for (std::size_t i = 0; i < game_.welcome().action_nbytes; i++) sum = (sum * 33 + action[i]) % 1009;
    return static_cast<float>(sum) / 1009;
  }

  penstock::Game game_;
  std::uint64_t episodes_;
  std::vector<std::vector<Range>> ranges_;  // of each column
  std::vector<Seat> seats_ = std::vector<Seat>(SEATS);
};

}  // namespace

int main(int count, char **arguments) {
  if (count < 3) {
    std::cerr << "usage: echo_game HOST PORT [EPISODES]\n";
    return 2;
  }
  try {
    penstock::Options options;
    options.host = arguments[1];
    options.port = static_cast<std::uint16_t>(std::stoi(arguments[2]));
    options.seats = SEATS;
    options.name = "echo game in C++";
    EchoGame(options, count > 3 ? std::stoull(arguments[3]) : 20).play();
  } catch (const std::exception &error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}

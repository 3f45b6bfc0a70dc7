# The echo game: what it sends is a rule, and its rewards are checksums of the actions that it got, so that
# `penstock check-client` can check every byte (docs/games-protocol.md).
#
#   penstock check-client -- godot3-server --path clients/godot -s echo_game.gd
#
# Arguments behind the script: HOST PORT [EPISODES]
extends SceneTree

const PenstockGame = preload("penstock_game.gd")
const SEATS = 3
const MOST_VALUES = 97
const LONGEST_S = 60.0  # for which no service answers

var penstock = PenstockGame.new()
var spaces = []  # one for each column of an observation
var rows = []  # that each seat has shown
var episode = []  # of each seat
var is_acting = []  # whether each seat is in its episode
var actions = []  # that each seat has got in it
var error = ""


func _initialize():
	var words = OS.get_cmdline_args()
	var script = Array(words).find("-s") + 1
	var arguments = Array(words).slice(script + 1, words.size() - 1)
	if script == 0 or arguments.size() < 2:
		printerr("give HOST PORT [EPISODES] behind -s echo_game.gd")
		return quit(2)
	var episodes = int(arguments[2]) if arguments.size() > 2 else 20
	quit(0 if _play(arguments[0], int(arguments[1]), episodes) else 1)


# Returns whether all episodes were played.
func _play(host, port, episodes):
	for _seat in SEATS:
		rows.append(0)
		episode.append(0)
		is_acting.append(false)
		actions.append(0)
	var _ok = penstock.connect("welcomed", self, "_on_welcomed")
	_ok = penstock.connect("faulted", self, "_on_faulted")
	_ok = penstock.connect("lost", self, "_on_lost")
	_ok = penstock.connect("refused", self, "_on_refused")
	penstock.open(host, port, {"seats": SEATS, "name": "echo game"})

	var turn = 0
	var answered_ms = OS.get_ticks_msec()
	while episode.min() < episodes:
		if not penstock.wait(LONGEST_S):
			if error or OS.get_ticks_msec() - answered_ms > 1000 * LONGEST_S:
				printerr(error if error else "nobody serves at %s:%d" % [host, port])
				return false
			OS.delay_msec(10)
			continue
		answered_ms = OS.get_ticks_msec()

		# In every third round the last seat takes its turn after the others.
		var last = SEATS - 1 if turn % 3 == 2 else SEATS
		for seat in SEATS:
			if seat == last:
				penstock.send()
			if episode[seat] < episodes:
				_write(seat)
		penstock.send()
		turn += 1
	penstock.close()
	return true


func _write(seat):
	var observation = _observation(seat)
	rows[seat] += 1
	if not is_acting[seat]:
		is_acting[seat] = true
		actions[seat] = 0
		penstock.write(seat, observation, PenstockGame.FIRST)
		return

	actions[seat] += 1
	var flags = 0
	if actions[seat] == 3 + (seat + 2 * episode[seat]) % 5:
		flags = PenstockGame.TERMINATED if episode[seat] % 2 == 0 else PenstockGame.TRUNCATED
	penstock.write(seat, observation, flags, _checksum(penstock.action_bytes(seat)) / 1009.0)
	if flags:
		_end(seat)


func _end(seat):
	is_acting[seat] = false
	episode[seat] += 1


func _on_welcomed():
	spaces = []
	_add_spaces(penstock.welcome["observation"])


func _on_faulted(seat, _field, _error):
	if is_acting[seat]:
		_end(seat)


func _on_lost(_reason):
	for seat in SEATS:
		if is_acting[seat]:
			_end(seat)


func _on_refused(field, reason):
	error = "%s: %s" % [field, reason]


func _checksum(bytes):
	var sum = 0
	for byte in bytes:
		sum = (sum * 33 + byte) % 1009
	return sum


# The columns of a row are the parts of the space in their order.
func _add_spaces(space):
	if space.has("Dict"):
		for part in space["Dict"]:
			_add_spaces(part[1])
	elif space.has("Tuple"):
		for part in space["Tuple"]:
			_add_spaces(part)
	else:
		spaces.append(space)


func _observation(seat):
	var observation = {}
	var element = 0
	for i in spaces.size():
		var column = penstock.welcome["row"][i]
		var size = 1
		for axis in column[2]:
			size *= int(axis)
		var is_float = column[1].ends_with("f4") or column[1].ends_with("f8")
		var bounds = _bounds(spaces[i], size)
		var values = []
		for j in size:
			var value = (rows[seat] * 31 + seat * 7 + element * 3) % MOST_VALUES
			element += 1
			if column[0] == "action_mask":
				value = 1
			elif is_float:
				value = value / 97.0
			else:
				var choices = min(bounds[1][j] - bounds[0][j] + 1, MOST_VALUES)
				value = int(bounds[0][j]) + value % int(choices)
			values.append(value)
		observation[column[0]] = values
	return observation


# The least and the greatest value of each number in a column of integers.
func _bounds(space, size):
	var kind = space.keys()[0]
	var content = space[kind]
	match kind:
		"Discrete":
			return [[content[1]], [content[1] + content[0] - 1]]
		"MultiDiscrete":
			var start = _numbers(content[1], size)
			var high = _numbers(content[0], size)
			for i in size:
				high[i] += start[i] - 1
			return [start, high]
		"Box":
			return [_numbers(content[0], size), _numbers(content[1], size)]
	return [_numbers(0, size), _numbers(1, size)]


# A number for all, or nested lists of them in the order of C.
func _numbers(content, size):
	var numbers = []
	if not content is Array:
		for _i in size:
			numbers.append(float(content))
		return numbers
	for inner in content:
		numbers += _numbers(inner, 1)
	return numbers

-- The account of one tenant in Redis: the rules of account.py, computed in the same order.
-- Each of the other scripts is appended to this text.
--
-- KEYS[1]: hash of the account's numbers.   KEYS[2]: sorted set of leases, by the microsecond of their end.
-- ARGV[1]: numbers, separated by spaces, in the order in which they are read below.
-- ARGV[2]: birth of an account that is created now.   ARGV[3]: birth of the account that the gateway remembers.
-- Further arguments belong to the other scripts.
-- The answer is a text: 1 or 0, and the numbers of the account. Its birth has no spaces.

local MINUTE_US, DAY_US, ROUNDING = 60000000, 86400000000, 1e-6
local FIELDS = {
  'at', 'requests', 'text_tokens', 'visual_tokens', 'cost', 'day', 'day_requests', 'day_text_tokens',
  'day_visual_tokens', 'day_cost', 'month', 'month_cost',
}

local words = string.gmatch(ARGV[1], '%S+')
local function number() return tonumber(words()) end
local function four() return {number(), number(), number(), number()} end

local now = number()                 -- microseconds of the epoch; 0: as Redis says
if now == 0 then
  local time = redis.call('TIME')
  now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end
local lifetime_ms, lease_us = number(), number()
local bounds = {minute = four(), day = four(), month_cost = number(), in_flight = number()}

-- 12 times the year, plus 0 for January. Years begin in March here, so that the leap day is the last one;
-- 400 years have 146,097 days.
local function month_of(day)
  local shifted = day + 719468
  local era = math.floor(shifted / 146097)
  local of_era = shifted - era * 146097
  local year = math.floor((of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524)
    - math.floor(of_era / 146096)) / 365)
  local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
  local from_march = math.floor((5 * of_year + 2) / 153)
  return (year + era * 400) * 12 + from_march + 2
end

local function read_account()
  local at, minute, day = number(), four(), number()
  local day_used, month = four(), number()
  return {at = at, minute = minute, day = day, day_used = day_used, month = month, month_cost = number()}
end

local function advance(account, now)
  local elapsed = now - account.at
  if elapsed <= 0 then
    if elapsed < -MINUTE_US then account.at = now end  -- the clock was set back
    return
  end
  for i = 1, 4 do
    if account.minute[i] ~= 0 then
      local left = bounds.minute[i] ~= 0 and account.minute[i] - elapsed * bounds.minute[i] / MINUTE_US or 0
      account.minute[i] = math.max(0, left)
    end
  end
  account.at = now
  local day = math.floor(now / DAY_US)
  if day > account.day then
    account.day, account.day_used = day, {0, 0, 0, 0}
    local month = month_of(day)
    if month ~= account.month then account.month, account.month_cost = month, 0 end
  end
end

local function load_account()
  local v = redis.call('HMGET', KEYS[1], 'birth', unpack(FIELDS))
  if not v[1] then
    local day = math.floor(now / DAY_US)
    return {birth = ARGV[2], at = now, minute = {0, 0, 0, 0}, day = day, day_used = {0, 0, 0, 0},
      month = month_of(day), month_cost = 0}
  end
  local n = {}
  for i = 1, #FIELDS do n[i] = tonumber(v[i + 1] or 0) end
  local account = {birth = v[1], at = n[1], minute = {n[2], n[3], n[4], n[5]}, day = n[6],
    day_used = {n[7], n[8], n[9], n[10]}, month = n[11], month_cost = n[12]}
  advance(account, now)
  return account
end

-- If Redis has lost the account since the gateway saw it, the larger numbers of both count.
local function restore(account, known)
  if ARGV[3] == '' or ARGV[3] == account.birth then return end
  advance(known, account.at)
  for i = 1, 4 do
    account.minute[i] = math.max(account.minute[i], known.minute[i])
    if known.day == account.day then
      account.day_used[i] = math.max(account.day_used[i], known.day_used[i])
    end
  end
  if known.month == account.month then
    account.month_cost = math.max(account.month_cost, known.month_cost)
  end
end

local function texts(account)
  local m, d = account.minute, account.day_used
  local values = {account.at, m[1], m[2], m[3], m[4], account.day, d[1], d[2], d[3], d[4], account.month,
    account.month_cost}
  for i = 1, #values do values[i] = string.format('%.17g', values[i]) end
  return values
end

local function save(account)
  local named, values = {'birth', account.birth}, texts(account)
  for i = 1, #FIELDS do
    named[#named + 1] = FIELDS[i]
    named[#named + 1] = values[i]
  end
  redis.call('HSET', KEYS[1], unpack(named))
  redis.call('PEXPIRE', KEYS[1], lifetime_ms)
end

local function hold(account, lease)
  local added = redis.call('ZADD', KEYS[2], 'NX', string.format('%.17g', account.at + lease_us), lease)
  redis.call('PEXPIRE', KEYS[2], math.ceil(lease_us / 1000) + 60000)
  account.in_flight = account.in_flight + added
end

local function answer(fits, account)
  return fits .. ' ' .. account.birth .. ' ' .. table.concat(texts(account), ' ') .. ' ' .. account.in_flight
end

local known = read_account()
local account = load_account()
restore(account, known)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.17g', account.at))
account.in_flight = redis.call('ZCARD', KEYS[2])
